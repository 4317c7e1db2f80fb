"""Detectors of gradients: kept, overwritten, missing, cleared too early, added up with those of another loss."""
