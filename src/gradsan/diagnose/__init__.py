"""Evidence → Diagnosis, by pure functions: no hooks, no torch, no words."""

from gradsan.diagnose.engine import diagnose
from gradsan.diagnose.strict import strictly

__all__ = ["diagnose", "strictly"]
