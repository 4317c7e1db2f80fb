"""Detectors of what is one tensor where the program takes it for two: names, lists, states and copies that are none."""
