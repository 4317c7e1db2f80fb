"""Detectors of semantic faults: autograd does what the program says, which its author did not mean."""
