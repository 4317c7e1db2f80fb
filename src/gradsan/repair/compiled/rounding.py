"""Rounding error of one operation, and the tolerance that follows from dtypes and reduction sizes."""

from __future__ import annotations

import math

UNITS = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
"""Unit roundoff of each dtype: half the distance from 1 to the next number."""

_SUMMED_IN = {"float16": "float32", "bfloat16": "float32"}
_LAMBDA = 4.0
_LEAST = 8.0
"""Unit roundoffs that are allowed in any case: a graph without sums is fused in another order, too."""


def squared_error(dtype: str, terms: float) -> float:
    """The square of the relative error of one operation whose longest sum has ``terms`` terms.

    A sum of n terms in floating point has a relative error of at most ``n u`` (Higham, Accuracy and Stability of
    Numerical Algorithms, 2nd edition, section 4.2), and with independent roundings of
    ``lambda sqrt(n) u`` with a probability that depends on lambda (Higham and Mary, A New Approach to Probabilistic
    Rounding Error Analysis, SIAM J. Sci. Comput. 41(5), 2019, theorem 2.4). ``u`` is the unit roundoff of the
    accumulator's dtype, which is float32 for the half types; the result is rounded once to its own dtype.
    """
    own, summed = UNITS.get(dtype, 0.0), UNITS.get(_SUMMED_IN.get(dtype, dtype), 0.0)
    return own**2 + max(terms, 1.0) * summed**2


def tolerance(squared_errors: float, dtype: str, position: int = 0) -> float:
    """Relative difference (Euclidean norm) that rounding explains, in the round ``position`` (from 0).

    ``squared_errors`` is the sum of :func:`squared_error` over the operations of a round, ``dtype`` the coarsest of
    them. Errors of independent operations add up by their squares; there are two computations, each with its own, and
    lambda is 4. Every round starts from the errors of the rounds before it, so as much is allowed once more.
    """
    allowed = _LAMBDA * math.sqrt(2.0 * squared_errors)
    return max(allowed, _LEAST * UNITS.get(dtype, UNITS["float32"])) * (1 + position)
