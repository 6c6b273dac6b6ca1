"""A local server and its page for attention maps of long texts, drawn from tiles."""

from headwise.reports.viewer.server import serve as serve
