"""Command line: one module per command, imported on use."""

from gradsan.cli._main import build_parser, main, parse

__all__ = ["build_parser", "main", "parse"]
