"""Small pictures without a library for them: colour maps, and matrices as PNG."""
