"""Costs of models and layers as tables."""
