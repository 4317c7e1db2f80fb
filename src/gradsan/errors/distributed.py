"""Clues to errors of DistributedDataParallel and FullyShardedDataParallel: the parameters and their owners.

Roles: ``parameter`` (``name`` in the wrapped module; ``values``: ``owner``, the class whose attribute it hangs on,
``attribute``; ``site`` the definition of that class's forward), ``past_backward`` (the last backward before),
``checkpoint_call`` (a call of reentrant checkpoint in the graph).

Roles: ``parameters`` (``name``: up to three names as the program's modules have them, ``values``: ``total``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from gradsan import _torch
from gradsan.errors.context import Context, of_node
from gradsan.graph import naming, walk
from gradsan.model import Clue
from gradsan.record.stacks import symbolise

_PARAMETERS_SHOWN = 8


def gather_reduced_twice(context: Context) -> tuple[Clue, ...]:
    """Return the parameter that the message names, and the calls of reentrant checkpoint."""
    named = _named(context, [context.values["name"]] if "name" in context.values else [])
    return (*named, *gather_checkpoint_calls(context))


def gather_unfinished(context: Context) -> tuple[Clue, ...]:
    """Return the parameters that the message numbers or names, and where they were left out."""
    module = _torch.wrapped_by_ddp(context.frames)
    names: list[str] = []
    if module is not None and "indices" in context.values:
        reduced = [name for name, one in module.named_parameters() if one.requires_grad]
        numbers = [int(number) for number in re.findall(r"\d+", context.values["indices"])]
        names = [reduced[number] for number in numbers if number < len(reduced)]
    names += re.findall(r"[\w.]+", context.values.get("names", ""))
    return (*_named(context, names), *gather_past_backward(context))


def _named(context: Context, names: list[str]) -> Iterator[Clue]:
    module = _torch.wrapped_by_ddp(context.frames)
    for name in names[:_PARAMETERS_SHOWN]:
        if module is None:
            yield Clue("parameter", name=name)
            continue
        owner, rest = naming.owner_in(module, name)
        values = {"owner": type(owner).__name__, "attribute": rest.partition(".")[0]}
        yield Clue("parameter", naming.forward_of(owner), name=name, values=values)


def gather_past_backward(context: Context) -> Iterator[Clue]:
    """Yield the last backward before."""
    past = [] if context.backwards is None else context.backwards.before(context.core.clock + 1)
    for one in past[-1:]:
        yield Clue("past_backward", symbolise(one.stack), op=one.via)


def gather_checkpoint_calls(context: Context) -> Iterator[Clue]:
    """Yield the calls of reentrant checkpoint in the graph of the outermost backward of the stack."""
    entry = next((frame for frame in context.frames if _torch.enters_engine(frame)), None)
    if entry is None:
        return
    yield Clue("outer_backward", context.site, op="backward")
    roots = [one.grad_fn for one in _torch.locals_of(entry)["t_outputs"] if getattr(one, "grad_fn", None) is not None]
    nodes = [node for node in walk.engine_order(roots) if _torch.function_class(node) is _torch.reentrant_checkpoint()]
    for node in sorted(nodes, key=lambda one: _torch.node_sequence(one) or 0):
        call = of_node(context.core, node, "checkpoint_call")
        if call is not None:
            yield call


_REPORTED = 3


def gather_sharded(context: Context) -> tuple[Clue, ...]:
    """Return the parameters of the group that the innermost frame of FSDP worked on."""
    names = _torch.flat_parameter_names(context.frames)
    if not names:
        return ()
    shown = ", ".join(names[:_REPORTED]) + (", …" if len(names) > _REPORTED else "")
    return (Clue("parameters", name=shown, values={"total": len(names)}),)
