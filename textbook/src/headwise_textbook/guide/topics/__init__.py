"""The topics of the guide: a module for each, with its `TOPIC`."""
