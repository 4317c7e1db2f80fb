"""gradsan inside trainers: a module for each framework, which imports it; this package imports none of them."""
