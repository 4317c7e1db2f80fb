"""Processes of a watched program: run as ``python`` would, their children and ranks, their reports."""
