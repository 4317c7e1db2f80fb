"""Flow of values: the definitions that reach a statement, calls and loops that carry values, where graphs are cut."""
