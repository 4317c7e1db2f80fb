"""Clues to writes that PyTorch refuses, to leaves and to views: the tensor, where it was made, the live leaves.

Roles: ``target`` (the written tensor, else the operand that the message is about: ``name`` as the source says it,
``op`` the operation; ``values``: ``part`` the written expression, ``backwards`` before it and, where it was found,
``known_as`` its name in a module or, of a ``for`` loop's variable, another one, ``shape``, ``dtype``, ``device``,
``is_parameter``, ``is_leaf``, ``requires_grad``, ``has_grad``, of a leaf ``value_learns``: what is written to it is
computed by a network, ``leaves_beside`` the other leaves that the statements behind it write alike), ``made`` (the
operation that made it, where it is the result of one).

Roles: ``shared_parameter`` (a parameter with several elements in one place, which a step was to update: its definition
is that of the class that made it, ``name`` its attribute there), ``shared_buffer`` (the same of a written buffer).

Roles: ``base_written`` (a logged write to the memory of the view since it was made), ``hooked_module`` (a module with
backward hooks: ``name`` the expression that reaches it, ``values``: ``module`` its class, ``certain`` whether it was
being called).

Roles: ``live``, one clue for each of the user's frames, outermost first; ``values``: ``requires_grad`` (expression ->
whether it does; of a module, whether any parameter does) and ``callees`` (expression -> file, first line and name of
what runs). ``mode``: whether gradients are switched on (``grad_enabled``), or off by ``inference`` mode; ``op``: the
library that calls the function. ``sources``: the ``files`` of the program. ``loss``: its ``shape``, ``dtype`` and
``device``. ``idle``: parameters, all that the live optimizers have, of which none requires grad (``op`` the class of
one; ``values``: ``total``, ``optimizer`` a name of it, ``are_chosen``, whether modules have frozen others beside
them, ``are_plain``, whether they are tensors of the program's and no Parameters).

Role: ``made`` (the operation that made the tensor; ``name`` as the source says it; ``values``: ``is_update``, whether
the statement that made it reads ``.grad`` itself, and ``shape``, ``dtype``, ``device``).
"""

from __future__ import annotations

import ast
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from types import FrameType, ModuleType
from typing import Any

import torch
from torch import nn

from gradsan import _torch, source
from gradsan.errors.context import Context, described, made_by, writes_to
from gradsan.graph import naming
from gradsan.graph.live import first_named, live_clues, name_bound_to, tensor_of, value_of
from gradsan.graph.variables import Reached, Scope, Space, modules_in, reached
from gradsan.graph.walk import learns_elsewhere, leaves_of
from gradsan.model import Clue, Frame, Site
from gradsan.record.backwards import PastBackward
from gradsan.record.ledger import call_that_made
from gradsan.record.stacks import definition_site, file_of, is_user_file, symbolise
from gradsan.source.tree import header_nodes


def _is_any(tensor: torch.Tensor) -> bool:
    return True


def _is_inference(tensor: torch.Tensor) -> bool:
    return bool(tensor.is_inference())


def _requires_grad(tensor: torch.Tensor) -> bool:
    return bool(tensor.requires_grad)


def _is_leaf_with_grad(tensor: torch.Tensor) -> bool:
    return bool(tensor.is_leaf and tensor.requires_grad)


def _is_result(tensor: torch.Tensor) -> bool:
    return not tensor.is_leaf


def _is_integer(tensor: torch.Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())


# Tests for the tensor of the message, by row, where the source does not show it as the written one.
OPERAND: dict[str, Callable[[Any], bool]] = {
    row: test
    for test, rows in (
        (_requires_grad, "apply_requires_grad data_incompatible data_not_floating export_requires_grad"),
        (_requires_grad, "numpy_requires_grad out_requires_grad resize_requires_grad"),
        (_is_result, "deepcopy_of_result flag_of_result"),
        (_is_any, "dirty_not_returned dirty_view_of_several"),
        (_is_integer, "flag_of_integer"),
        (_is_inference, "inference_requires_grad inference_saved inference_version inference_written"),
        (_is_leaf_with_grad, "leaf_inplace leaf_marked_dirty leaf_view_inplace"),
        (_torch.is_refused, "multi_view_base_written unrecorded_view_base_written"),
    )
    for row in rows.split()
}
WRITTEN_ONLY = (
    *("function_view_inplace", "memory_overlap", "multi_view_inplace", "result_dtype", "result_shape"),
    *("source_overlap", "transform_writes_captured", "unrecorded_view_inplace", "view_detached"),
    *("vmap_writes_smaller",),
)
_LEAF_ROWS = ("leaf_inplace", "leaf_view_inplace")
_READING = ("deepcopy_of_result", "inference_saved", "multi_view_base_written", "unrecorded_view_base_written")
"""Rows whose tensor the statement only reads."""


def gather_written(context: Context) -> tuple[Clue, ...]:
    """Return the tensor of the statement; empty for an error of a backward, and where the source does not show it."""
    own = context.site.user_frame
    if own is None or context.frame is None or not context.is_at_statement:
        return ()
    written = None if context.row in _READING else source.writing_at(own, context.site.inner_frames)
    if written is not None:
        tensor = tensor_of(context.frame, written.target)
        name, op, part = written.target, written.op, written.expression
    else:
        found = _operand(context)
        if found is None:
            return _stepped_parameter(context) if context.row == "memory_overlap" else ()
        name, tensor = found
        op, part = source.called_expression(own) or "", name
    facts = {} if tensor is None else described(tensor, context.frame, name)
    values = {"part": part, "backwards": context.core.backwards, **facts}
    is_leaf_given_out = context.row == "out_requires_grad" and tensor is not None and _is_leaf_with_grad(tensor)
    if tensor is not None and (context.row in _LEAF_ROWS or is_leaf_given_out):
        values["value_learns"] = _value_learns(context.frame, own, tensor)
        values["leaves_beside"] = _leaves_beside(context.frame, own, bool(values["value_learns"]))
    if tensor is not None and context.row == "unrecorded_view_inplace":
        values["value_learns"] = not _is_parameters(tensor) and _reads_learning(context.frame, own, tensor)
    if context.row == "deepcopy_of_result":
        beside = [one for one in _within(context.frame, own, _operands(own)) if _is_result(one.value)]
        values["copied_beside"] = tuple({id(one.value): one.path for one in beside if one.value is not tensor}.values())
        values["files"] = _user_files()
        values["is_copied_itself"] = name in source.operand_expressions(own)
    target = Clue("target", context.site, name=name, op=op, values=values)
    made = made_by(context.core, tensor)
    held = _expanded_buffer(tensor) if context.row == "memory_overlap" and tensor is not None else None
    return (target, *((held,) if held else ()), *((made,) if made else ()))


def _expanded_buffer(tensor: torch.Tensor) -> Clue | None:
    """The buffer of a live module that the tensor is, by the class that made it."""
    for module in naming.modules_alive():
        for attribute, one in module.named_buffers(recurse=False):
            code = getattr(type(module).__init__, "__code__", None)
            if one is tensor and code is not None:
                return Clue("shared_buffer", definition_site(code), name=attribute)
    return None


def _stepped_parameter(context: Context) -> tuple[Clue, ...]:
    """The parameter with several elements in one place that a step was to update, and the class that made it."""
    stepping = (_torch.locals_of(frame).get("self") for frame in reversed(context.frames))
    optimizer = next((one for one in stepping if isinstance(one, torch.optim.Optimizer)), None)
    held = [] if optimizer is None else _torch.parameters_of(optimizer)
    shared = next((one for one in held if one.grad is not None and _repeats_elements(one)), None)
    if optimizer is None or shared is None or context.frame is None:
        return ()
    name, op = naming.name_of(shared, context.frame), f"{type(optimizer).__name__}.step"
    target = Clue("target", context.site, name=name, op=op, values=described(shared, context.frame, name))
    for module in naming.modules_alive():
        for attribute, one in module.named_parameters(recurse=False):
            code = getattr(type(module).__init__, "__code__", None)
            if one is shared and code is not None:
                return target, Clue("shared_parameter", definition_site(code), name=attribute)
    return target, Clue("shared_parameter", name=name)


def _repeats_elements(tensor: torch.Tensor) -> bool:
    """Whether an expanded dimension puts several elements at one place."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True) if tensor.layout is torch.strided else ()
    return any(stride == 0 and size > 1 for size, stride in sizes)


def _value_learns(frame: FrameType, own: Frame, written: Any) -> bool:
    """Whether the statement calls a module that is trained, or reads a tensor that one has computed.

    Without ``written`` any tensor with a graph counts.
    """
    statement = source.statement_at(own)
    if statement is None:
        return False
    callees = [ast.unparse(node.func) for node in header_nodes(statement.node) if isinstance(node, ast.Call)]
    called = [value_of(frame, callee) for callee in callees]
    if any(isinstance(one, nn.Module) and any(p.requires_grad for p in one.parameters()) for one in called):
        return True
    names = source.consumed_names(statement)
    if written is None:
        return first_named(frame, names, _is_result) is not None
    return first_named(frame, names, lambda one: learns_elsewhere(one, written)) is not None


def _is_parameters(view: torch.Tensor) -> bool:
    """Whether it is a view of a parameter: what is written to that is an update."""
    base = view if view._base is None else view._base
    return isinstance(base, nn.Parameter) or (base.is_leaf and base.requires_grad)


def _reads_learning(frame: FrameType, own: Frame, written: torch.Tensor) -> bool:
    """Whether the statement reads another tensor that requires grad: the write is part of what is differentiated."""
    statement = source.statement_at(own)
    names = [] if statement is None else source.consumed_names(statement)
    return first_named(frame, names, lambda one: one.requires_grad and one is not written) is not None


def gather_optimized(context: Context) -> tuple[Clue, ...]:
    """Return the result of an operation that an optimizer was given, and the leaf that it alone is computed from."""
    adding = next((one for one in reversed(context.frames) if one.f_code.co_name == "add_param_group"), None)
    given = None if adding is None else _torch.locals_of(adding).get("param")
    if not torch.is_tensor(given) or given.grad_fn is None or context.frame is None:
        return ()
    name, leaves = naming.name_of(given, context.frame), leaves_of([given.grad_fn])
    held = next((one.path for one in naming.find(context.frame, lambda one: any(one is leaf for leaf in leaves))), None)
    facts = {**described(given, context.frame, name), "leaf": held if len(leaves) == 1 else None}
    made = made_by(context.core, given)
    return (Clue("target", context.site, name=name, values=facts), *((made,) if made else ()))


def gather_assigned(context: Context) -> tuple[Clue, ...]:
    """Return the parameter that the statement assigns a tensor to."""
    own = context.site.user_frame
    name = None if own is None else source.attribute_assigned(own)
    if own is None or context.frame is None or name is None:
        return ()
    setting = next((one for one in reversed(context.frames) if one.f_code.co_name == "__setattr__"), None)
    given = {} if setting is None else _torch.locals_of(setting)
    module, value = given.get("self"), given.get("value")
    found = module._parameters.get(str(given.get("name"))) if isinstance(module, nn.Module) else None
    parameter = tensor_of(context.frame, name) if found is None else found
    facts = {} if parameter is None else described(parameter, context.frame, name)
    facts |= {"value_learns": _value_learns(context.frame, own, parameter)}
    if torch.is_tensor(value) and parameter is not None:
        facts |= {"is_of_shape": value.shape == parameter.shape, "has_graph": value.requires_grad}
    return (Clue("target", context.site, name=name, values=facts),)


def _leaves_beside(frame: FrameType, own: Frame, value_learns: bool) -> tuple[str, ...]:
    """The other variables that later statements of the block write alike, where PyTorch refuses that, too."""
    found = []
    for behind in source.written_behind(own):
        written = source.writing_at(behind)
        tensor = None if written is None else tensor_of(frame, written.target)
        if written is not None and tensor is not None and _is_leaf_with_grad(tensor):
            found += [written.target] if _value_learns(frame, behind, tensor) == value_learns else []
    return tuple(dict.fromkeys(found))


def _operand(context: Context) -> tuple[str, Any] | None:
    """Return the first operand of the statement that the message may mean, also in an object's attribute."""
    own, wanted = context.site.user_frame, OPERAND.get(context.row)
    if own is None or wanted is None or context.frame is None:
        return None
    names = _operands(own)
    direct = first_named(context.frame, names, wanted)
    if direct is not None:
        return direct
    holders = [name for name in names if value_of(context.frame, name) is not None]
    for found in naming.find(context.frame, wanted):
        if any(found.path.startswith((f"{name}.", f"{name}[")) for name in holders):
            return found.path, found.tensor
    # A frame further out may reach the same objects by another name, and each is searched once.
    return next(((one.path, one.value) for one in _within(context.frame, own, holders) if wanted(one.value)), None)


def _operands(own: Frame) -> list[str]:
    statement, owner = source.statement_at(own), source.attribute_owner(own)
    names = [*([owner] if owner else []), *source.operand_expressions(own)]
    return [*names, *(source.consumed_names(statement) if statement is not None else [])]


def _within(frame: FrameType, own: Frame, names: Iterable[str]) -> Iterator[Reached]:
    """The tensors that objects of these names hold."""
    held = {name: value_of(frame, name) for name in names}
    spaces = [Space(Scope(own.file, own.function), held, frozenset())]
    return (one for one in reached(spaces) if torch.is_tensor(one.value))


def gather_stale_view(context: Context) -> tuple[Clue, ...]:
    """Return the writes to the memory of the view; for an error of a backward the view, too."""
    if context.frame is None:
        return ()
    if context.backward is None:
        target = next(iter(gather_written(context)), None)
        view = None if target is None or target.name is None else tensor_of(context.frame, target.name)
        return () if view is None else writes_to(context.core, view)
    found = next(iter(naming.find(context.frame, _torch.is_refused)), None)
    if found is None:
        return ()
    target = Clue("target", context.site, name=found.path, values=described(found.tensor, context.frame))
    made = made_by(context.core, found.tensor)
    return (target, *((made,) if made else ()), *writes_to(context.core, found.tensor))


def gather_hooked_modules(context: Context) -> tuple[Clue, ...]:
    """Return the running modules that have backward hooks, else those held by live variables."""
    called = [_torch.locals_of(frame).get("self") for frame in context.frames if frame.f_code.co_name == "_call_impl"]
    running = [one for one in called if isinstance(one, nn.Module) and _torch.has_backward_hooks(one)]
    if running:
        return tuple(_module_clue("", one, True) for one in running[-1:])
    frame = context.frame
    if frame is None:
        return ()
    found: dict[int, Clue] = {}
    for name, value in {**frame.f_globals, **_torch.locals_of(frame)}.items():
        if isinstance(value, nn.Module):
            for inner, module in value.named_modules():
                if _torch.has_backward_hooks(module):
                    found.setdefault(id(module), _module_clue(f"{name}.{inner}" if inner else name, module, False))
    return tuple(found.values())[:3]


def _module_clue(name: str, module: nn.Module, certain: bool) -> Clue:
    return Clue("hooked_module", name=name or None, values={"module": type(module).__name__, "certain": certain})


_MOST_BACKWARDS, _NAMED = 16, 4


def gather_live(context: Context) -> tuple[Clue, ...]:
    """Return the mode, and the clues of the frames from the failing one outwards."""
    mode = {"grad_enabled": torch.is_grad_enabled(), "inference": torch.is_inference_mode_enabled()}
    found = [Clue("mode", op=_library_around(context.frame), values=mode)]
    losses = [] if context.backward is None else [one for one in context.backward.outputs if torch.is_tensor(one)]
    found += [Clue("loss", values=_torch.facts_of(one)) for one in losses[:1]]
    if context.backward is not None and context.backwards is not None:
        past = context.backwards.before_in_thread(context.backward.clock)[-_MOST_BACKWARDS:]
        if past:
            found.append(Clue("others_ran_before"))
        if _has_run_before(context, past):
            found.append(Clue("ran_before"))
    found.append(Clue("sources", values={"files": _user_files()}))
    return (*live_clues(context.frame), *reversed(found), *_idle_optimizers(context.frame))


def _user_files() -> tuple[str, ...]:
    """The files of the program that modules have been made of."""
    # A module that imports on demand is not asked.
    files = (vars(one).get("__file__") for one in list(sys.modules.values()) if isinstance(one, ModuleType))
    return tuple(file for file in dict.fromkeys(files) if isinstance(file, str) and is_user_file(file))


def _library_around(frame: FrameType | None) -> str | None:
    """The package, none of torch's own, that the program calls and that calls its function; it works with torch."""
    package = None
    while frame is not None:
        if is_user_file(file_of(frame.f_code)):
            if package is not None:
                return package
        elif package is None and "torch" in frame.f_globals:
            name = str(frame.f_globals.get("__name__", "")).partition(".")[0]
            package = name if name not in ("torch", "gradsan") else None
        frame = frame.f_back
    return None


def _idle_optimizers(frame: FrameType | None) -> Iterator[Clue]:
    # A trainer may wrap an optimizer in another one.
    optimizers = sorted(naming.optimizers_alive(), key=lambda one: not type(one).__module__.startswith("torch."))
    held = list({id(one): one for one in _torch.parameters_of(*optimizers)}.values())
    if not held or any(one.requires_grad for one in held):
        return
    names = [name for one in held[:_NAMED] if (name := naming.name_of(one, frame)) is not None]
    owned = {id(one) for one in held}
    beside = naming.frozen_beside(owned, modules_in(frame))
    values: dict[str, object] = {
        "total": len(held),
        "are_chosen": any(id(one) not in owned for one in beside),
        "are_plain": not any(isinstance(one, nn.Parameter) for one in held),
    }
    if len(optimizers) == 1 and (bound := name_bound_to(optimizers[0], frame)) is not None:
        values["optimizer"] = bound
    yield Clue("idle", name=", ".join(names) or None, op=type(optimizers[0]).__name__, values=values)


def _has_run_before(context: Context, past: list[PastBackward]) -> bool:
    """Whether an earlier round has called the same backward by the same lines, and so had a loss with a graph."""
    own = _user_lines(context.site)
    return any(_user_lines(symbolise(one.stack)) == own for one in reversed(past))


def _user_lines(site: Site) -> list[tuple[str, int]]:
    return [(one.file, one.line) for one in site.frames if one.is_user]


def gather_non_leaf(context: Context) -> tuple[Clue, ...]:
    """Return the tensor whose ``.grad`` is read, if the source names it."""
    own = context.site.user_frame
    found = None if own is None else source.expression_at(own)
    if found is None or not isinstance(found.node, ast.Attribute) or context.frame is None:
        return ()
    name = found.source.text(found.node.value)
    tensor = tensor_of(context.frame, name)
    number = None if tensor is None or tensor.grad_fn is None else _torch.node_sequence(tensor.grad_fn)
    if number is None:
        return (Clue("made", name=name),)
    call = call_that_made(context.core, number, threading.get_ident())
    made = None if call is None else symbolise(call.stack)
    frame = None if made is None else made.user_frame
    values = {"is_update": frame is not None and source.reads_gradient(frame), **_torch.facts_of(tensor)}
    return (Clue("made", made, name=name, op=tensor.grad_fn.name(), values=values),)
