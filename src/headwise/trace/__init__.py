"""Attention step by step, on real tensors, with every shape: for learning and teaching."""

from headwise.trace.follow import trace as trace
from headwise.trace.show import print_trace as print_trace
from headwise.trace.steps import Step as Step
