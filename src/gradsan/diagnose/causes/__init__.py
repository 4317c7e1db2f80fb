"""diagnose/causes."""
