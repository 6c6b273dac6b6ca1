"""The main job: what every head of a model looks at in a text, as a report."""

from headwise.reports.see.look import see as see
from headwise.reports.see.passages import sentences as sentences
from headwise.reports.see.watched import report as report
