"""Forms of an operation that stay finite: stable functions, bounds, masks, reductions over nothing."""
