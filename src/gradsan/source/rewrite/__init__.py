"""Changed lines: a statement rewritten so that it means what backward needs."""
