"""Small pictures without a drawing library: colour maps, and matrices as PNG."""
