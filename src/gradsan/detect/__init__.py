"""Detectors of faults that PyTorch does not report, one file per kind."""
