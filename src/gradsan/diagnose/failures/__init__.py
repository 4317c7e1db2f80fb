"""What lies behind a failure, one file a cause: errors and warnings of autograd's other than the version check's.

A cause is a module with ``ROWS``, the slugs of the catalogue's rows it explains, and ``match(failure)``, which gives a
:class:`~gradsan.model.Diagnosis`, or None where the row has another cause this time. Those with one code name it
``CODE`` and ``SLUG``. It is registered in ``_CAUSES``, whose order decides where several would fit. The parts of such a
diagnosis are built in ``parts.py``; its words are ``title.<slug>`` and ``explanation.<slug>``.
"""

from __future__ import annotations

from gradsan.diagnose.failures import leaf_written, second_backward
from gradsan.model import Diagnosis, Failure

_CAUSES = (leaf_written, second_backward)


def explain(failure: Failure) -> Diagnosis | None:
    """The diagnosis of the first cause that recognises ``failure``; None where none does."""
    for cause in _CAUSES:
        if failure.row in cause.ROWS:
            diagnosis = cause.match(failure)
            if diagnosis is not None:
                return diagnosis
    return None
