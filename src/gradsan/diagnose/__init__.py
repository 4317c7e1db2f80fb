"""Evidence → Diagnosis, by pure functions: no hooks, no torch, no words."""

from gradsan.diagnose.engine import diagnose

__all__ = ["diagnose"]
