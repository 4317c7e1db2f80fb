"""gradsan: a gradient sanitizer for PyTorch."""
