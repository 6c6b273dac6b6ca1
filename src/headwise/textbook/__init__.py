"""For readers of a textbook: claims measured, every step of attention with numbers, the costs of a design."""
