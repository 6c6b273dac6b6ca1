"""Attention step by step on real tensors, with every shape."""

from headwise.nn.steps import Step as Step
from headwise.textbook.trace.follow import trace as trace
from headwise.textbook.trace.show import print_trace as print_trace
