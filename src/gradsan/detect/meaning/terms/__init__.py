"""Detectors of terms of a loss that train nothing: constants, numbers, and terms whose gradients are thrown away."""
