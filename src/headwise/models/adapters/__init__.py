"""Attention of other libraries, computed here."""
