"""Trials: the program run with a patch laid over it, in a process and with files of its own."""
