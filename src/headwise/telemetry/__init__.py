"""A record of every head while a model runs."""
