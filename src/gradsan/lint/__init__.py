"""Faults of autograd read in source files, without running them: what ``gradsan lint`` does. It imports no torch."""

from gradsan.lint.check import Checked, check
from gradsan.lint.running import lint_files

__all__ = ["Checked", "check", "lint_files"]
