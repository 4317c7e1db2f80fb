"""Detectors of faults of meaning: autograd does what the program says, which its author did not mean."""
