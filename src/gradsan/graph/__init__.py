"""Graph of one backward: its Nodes, its stale saved tensors, and the names of the tensors involved."""
