"""GS601 to GS605: diagnoses of NaN and Inf."""

from gradsan.diagnose.nonfinite.origin import explain

__all__ = ["explain"]
