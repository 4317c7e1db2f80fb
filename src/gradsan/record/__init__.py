"""Recording of a run: operations, writes, optimizer steps and backward calls, as they happen."""
