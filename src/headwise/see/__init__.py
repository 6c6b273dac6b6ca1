"""The main job: what every head of a decoder looks at in a text, as a report."""

from headwise.see.look import SHOWN as SHOWN, see as see, sentences as sentences
