"""Static analysis of autograd faults in source files, without running them: ``gradsan lint``. It imports no torch."""

from gradsan.lint.check import Checked, check
from gradsan.lint.running import lint_files

__all__ = ["Checked", "check", "lint_files"]
