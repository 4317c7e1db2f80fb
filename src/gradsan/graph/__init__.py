"""Graph of one backward: its Nodes, its stale saved tensors, and the names of what hangs on it."""
