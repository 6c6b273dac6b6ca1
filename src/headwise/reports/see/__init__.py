"""Reports of what every head of a model attends to in a text."""

from headwise.reports.see.front import see as see, show as show
from headwise.reports.see.passages import sentences as sentences
from headwise.reports.see.watched import report as report
