"""Trials: runs of the program with a patch applied, in a process and with files of its own."""
