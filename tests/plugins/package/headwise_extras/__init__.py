"""A package that is no part of headwise: one part of each kind, each in one file that registers it."""
