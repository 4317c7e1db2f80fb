"""Heuristics by names: what a name in the user's program suggests where nothing else in it says so.

A name proves nothing. They choose between words, order fixes, hold one back, or keep gradsan silent. None makes it
report something, but for ``INITIALISERS``, which says that some reads are no use. Each has the programs that asked for
it. Names of PyTorch's own, and its convention for methods that work in place
(:func:`gradsan.source.inplace.is_inplace_name`), are facts and stand elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable

INITIALISERS = frozenset({"reset_parameters", "init_weights", "_init_weights", "initialize"})
"""Methods that give parameters their first values: that a parameter is read there does not say that it is used.

Asked for by a model whose forward reads ``self.pos.data`` and whose ``init_weights`` reads ``self.pos``. What is
reported is what the bytecode of the forward does.
"""

_SETTING_UP = frozenset({"init", "initialise", "initialize", "reset", "build", "load"})
_PARAMETERS = frozenset({"weight", "bias"})
_DATA_PARALLEL = frozenset({"DistributedDataParallel", "DDP"})


def is_named_in_place(function: str) -> bool:
    """Whether the user's function has the name of one that works in place, as ``scale_`` has, and ``__call__`` has not.

    Asked for by helpers that return the tensor they were given, changed, as PyTorch's own do. Keeps gradsan silent: who
    calls it means the write (GS215, GS216).
    """
    return function.endswith("_") and not function.endswith("__")


def sets_up(function: str) -> bool:
    """Whether the user's function is named as one that fills parameters before training: a word of ``_SETTING_UP``.

    Asked for by ``reset_parameters`` and ``init_state`` that write into leaves. Puts ``no_grad`` first among the fixes
    of GS301, and says "initialisation"; ``initial`` is not such a word.
    """
    return not _SETTING_UP.isdisjoint(function.rpartition(".")[2].lower().split("_"))


_STAYING = frozenset(
    {
        *("adv", "advantage", "advantages", "baseline", "label", "labels", "old", "ref", "reference", "returns"),
        *("target", "targets", "teacher", "tgt"),
    }
)


def stays_as_computed(name: str) -> bool:
    """Whether a value has the name of one that a loss compares with and that trains nothing: ``old_logp``, ``adv``.

    Asked for by targets and advantages computed once for several rounds over one batch. Puts their ``detach()`` before
    the fix that computes them in every round (GS403), and holds both back from being written unasked.
    """
    return not _STAYING.isdisjoint(name.lower().replace(".", "_").split("_"))


def class_names(names: Iterable[str]) -> set[str]:
    """Those that look like a class: they begin with a capital letter.

    Asked for by loops that build a model or an optimizer anew. Holds a fix back that would move or repeat the
    statement; networks called ``D`` and ``G`` are the exception, which the caller knows by their being assigned.
    """
    return {name for name in names if name.lstrip("_")[:1].isupper()}


def is_layers_parameter(attribute: str) -> bool:
    """Whether an attribute that the file does not assign is a layer's parameter: ``self.fc.weight``.

    Asked for by updates by hand of a layer's weights. Holds the fix back that would bind the attribute anew.
    """
    return attribute in _PARAMETERS


def wraps_for_ranks(called: str) -> bool:
    """Whether a call makes a DistributedDataParallel, by its name or the usual short one.

    Asked for by ``from torch.nn.parallel import DistributedDataParallel as DDP``. Says only which line a fix changes.
    """
    return called in _DATA_PARALLEL
