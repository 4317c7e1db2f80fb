"""Values without a graph that may be meant to have one, and graphs cut at another place."""
