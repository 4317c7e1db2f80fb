"""Detectors of what PyTorch does not report, one file a kind."""
