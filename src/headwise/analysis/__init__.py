"""What heads do, which of them are alike, and which of them matter."""
