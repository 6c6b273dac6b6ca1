"""A local server and its page: attention maps of long texts, drawn from tiles."""

from headwise.reports.viewer.server import serve as serve
