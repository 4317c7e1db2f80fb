"""Abstract reading of a file: every statement once, with tensors, memory and graphs that only stand for real ones."""
