"""What a reader of a textbook runs: every claim measured, every step with its numbers, what a design takes."""
