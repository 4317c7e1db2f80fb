"""Abstract interpreter of a file: every statement once, with abstract tensors, memory and graphs."""
