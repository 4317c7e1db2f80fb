"""Origin of NaN and Inf: every result and every gradient is searched, and what made the first bad one is kept."""
