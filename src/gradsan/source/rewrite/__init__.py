"""Rewritten statements: changes of lines that keep the values which backward needs."""
