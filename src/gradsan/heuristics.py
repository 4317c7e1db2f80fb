"""Heuristics by names in the user's program, for questions that nothing else in it decides.

A name proves nothing. Heuristics choose between words, order fixes, hold one back, or keep gradsan silent. None makes
it report something, except ``INITIALISERS``, which marks reads that are no use. Each names the programs that needed
it. PyTorch's own names, and its convention for methods that work in place
(:func:`gradsan.source.methods.is_inplace_name`), are facts and are defined elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

INITIALISERS = frozenset({"reset_parameters", "init_weights", "_init_weights", "initialize"})
"""Methods that initialise parameters: a read of a parameter there does not count as use.

Needed by a model whose forward reads ``self.pos.data`` and whose ``init_weights`` reads ``self.pos``. A report depends
on the bytecode of the forward.
"""

_SETTING_UP = frozenset({"init", "initialise", "initialize", "reset", "build", "load"})
_PARAMETERS = frozenset({"weight", "bias"})
_STEP_FUNCTION = re.compile(
    r"(^|_)(sign|sgn|round|floor|ceil|trunc)(_|$)|heaviside|binar|ternar|quant|discret|bernoulli|argmax|one_hot"
)
_ACTIVATIONS = ("act", "relu", "elu", "silu", "swish", "mish", "drop", "nonlin", "non_lin", "tanh", "sigmoid")
_WITHOUT_TRAINING = re.compile(r"infer|generat|export|deploy|onnx|tracing|scripting|\beval|test_mode|cache|incremental")
_DATA_PARALLEL = frozenset({"DistributedDataParallel", "DDP"})


def is_named_in_place(function: str) -> bool:
    """Whether the user's function is named like one that works in place (``scale_``, but not ``__call__``).

    Needed by helpers that change and return their argument, as PyTorch's own do. Keeps gradsan silent: a
    caller expects the write (GS215, GS216).
    """
    return function.endswith("_") and not function.endswith("__")


def sets_up(function: str) -> bool:
    """Whether the user's function is named like one that fills parameters before training: a word of ``_SETTING_UP``.

    Needed by ``reset_parameters`` and ``init_state`` that write into leaves. Puts ``no_grad`` first among the fixes
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
    """Whether a value is named like a constant that a loss compares with: ``old_logp``, ``adv``.

    Needed by targets and advantages computed once for several rounds over one batch. Puts their ``detach()`` before
    the fix that computes them in every round (GS403), and keeps both from being applied automatically.
    """
    return not _STAYING.isdisjoint(name.lower().replace(".", "_").split("_"))


def class_names(names: Iterable[str]) -> set[str]:
    """Return the names that look like a class: they begin with a capital letter.

    Needed by loops that build a model or an optimizer again and again. Holds back a fix that would move or repeat the
    statement; networks called ``D`` and ``G`` are the exception, which the caller knows by their assignments.
    """
    return {name for name in names if name.lstrip("_")[:1].isupper()}


def is_layers_parameter(attribute: str) -> bool:
    """Whether an attribute that the file does not assign is a layer's parameter: ``self.fc.weight``.

    Needed by manual updates of a layer's weights. Holds back the fix that would rebind the attribute.
    """
    return attribute in _PARAMETERS


def is_step_function(function: str) -> bool:
    """Whether a function is named like one whose derivative is zero: it rounds, takes signs, or quantises.

    Needed by straight-through estimators with functions of their own, such as ``binarize``. Keeps gradsan silent about
    a change past autograd, which is the purpose there (GS202).
    """
    return _STEP_FUNCTION.search(function.lower()) is not None


def compares_values(function: str) -> bool:
    """Whether a function is named like one that compares two values: ``assertAlmostEqual``, ``allclose``, ``equal``.

    Needed by tests that add a loss up by another way of computing it. Keeps gradsan silent about such a sum (GS422).
    """
    return function == "equal" or any(part in function.lower() for part in ("close", "almost", "approx"))


def is_activation(module: str) -> bool:
    """Whether a module that the file does not construct is named like one activation or dropout: ``self.act``.

    Needed by blocks that take ``act`` as an argument. Decides which argument of a call is the written tensor.
    """
    return any(part in module.lower() for part in _ACTIVATIONS)


def is_gradient(variable: str) -> bool:
    """Whether a variable is named like a gradient, or like the learning rate that multiplies one.

    Needed by updates by hand, ``w -= lr * g``. Chooses between words, and puts ``no_grad`` first among fixes (GS301).
    """
    return variable in ("g", "lr") or "grad" in variable.lower()


def excludes_training(names: Iterable[str]) -> bool:
    """Whether the names in a condition suggest that no training takes its branch: ``if self.export``.

    Needed by caches of generation and branches for tracing. Keeps ``gradsan lint`` silent there.
    """
    return any(map(_WITHOUT_TRAINING.search, names))


def wraps_for_ranks(called: str) -> bool:
    """Whether a call makes a DistributedDataParallel, by its name or its common short one.

    Needed by ``from torch.nn.parallel import DistributedDataParallel as DDP``. Decides only which line a fix changes.
    """
    return called in _DATA_PARALLEL


_DRAWING = re.compile(r"^(sample|draw)(_|$)|^(get|next|fetch|load|make|random)_(mini_?)?batch(es)?$")


def draws_batch(function: str) -> bool:
    """Whether a function is named like one that draws a batch: ``memory.sample_buffer()``, ``get_batch()``.

    Needed by replay buffers of the user's own. Holds back a fix that would run the call again: it would give another
    batch than the one that the rest of the round has.
    """
    return _DRAWING.search(function) is not None
