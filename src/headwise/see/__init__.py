"""The main job: what every head of a model looks at in a text, as a report."""

from headwise.see.look import see as see
from headwise.see.numbers import SHOWN as SHOWN
from headwise.see.passages import sentences as sentences
from headwise.see.watched import report as report
