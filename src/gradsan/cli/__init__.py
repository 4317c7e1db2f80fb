"""The command line: one module per command, imported only when it is asked for."""

from gradsan.cli._main import main

__all__ = ["main"]
