"""Graphs that are kept alive from round to round: by variables that reach back, and by sums and containers."""
