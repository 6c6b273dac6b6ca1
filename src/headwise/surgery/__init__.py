"""Taking heads out of a model for real, and letting them share keys and values."""
