"""Detectors of one tensor that the program takes for two: names, lists, states, and assumed copies."""
