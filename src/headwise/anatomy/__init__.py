"""Where a model's heads are, whoever made the model."""
