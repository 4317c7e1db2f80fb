"""Diagnosis of evidence, by pure functions: no hooks, no torch, no words."""

from gradsan.diagnose.engine import diagnose, strictly

__all__ = ["diagnose", "strictly"]
