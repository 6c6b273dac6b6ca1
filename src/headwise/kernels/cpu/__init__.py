"""The compiled kernel for the CPU."""
