"""A copy for a layer that works in place: what it is called with stays as autograd has saved it."""

from __future__ import annotations

from gradsan.model import Diagnosis, Fix
from gradsan.repair.fixes._clones import clone_what_is_given


def suggest(diagnosis: Diagnosis) -> tuple[Fix, ...]:
    """Where the user's code calls the layer or the function with one tensor, ``.clone()`` behind that tensor."""
    if diagnosis.cause != "inplace_module":
        return ()
    return clone_what_is_given(diagnosis, "clone_for_layer", lambda call: next(iter(call.args), None))
