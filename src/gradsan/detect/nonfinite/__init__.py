"""Origin of NaN and Inf: every result and every gradient is searched, and the origin of the first bad one is kept."""
