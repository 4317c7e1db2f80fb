"""Changes of arguments and calls: ``inplace``, ``fused``, ``use_reentrant``, DistributedDataParallel's, rejected calls.

``fused=False`` repairs nothing by itself; as a trial it shows that the step wrote, and the program fails loudly.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial

from gradsan.heuristics import wraps_for_ranks
from gradsan.model import Diagnosis, Fix, Label, Lines
from gradsan.repair.fixes import _blocks as blocks
from gradsan.source.change import Change, Edit, changed_lines, edited, with_keyword
from gradsan.source.flow.modules import inplace_attribute_false, inplace_layers_false
from gradsan.source.flow.scopes import flag_owner
from gradsan.source.flow.writing import definition_of
from gradsan.source.identifiers import leaf_name
from gradsan.source.locate import Expression, expressions_at, statement_at
from gradsan.source.rewrite.moving import is_whole_lines
from gradsan.source.rewrite.out_of_place import out_of_place
from gradsan.source.tree import SourceFile, Span, read_source

_MOST_PLACES = 5


def disable_inplace_module(diagnosis: Diagnosis) -> tuple[Fix, ...]:
    """``inplace=False`` at each place alone that makes a layer of the writing class, at all of them, and on set flags.

    A stack does not show which of several layers wrote; a run shows whether a single one is enough.
    """
    writer = diagnosis.title.values.get("writer") or diagnosis.explanation.values.get("writer")
    is_refused = diagnosis.cause != "inplace_module"
    if is_refused:
        # Of layers that PyTorch refuses, the others of the class would be refused next.
        writer = _layer_of(diagnosis) if blocks.advice(diagnosis, "disable_inplace_module") is not None else None
    if not isinstance(writer, str):
        return ()
    found: list[Fix] = []
    for file in _files(diagnosis):
        changes = inplace_layers_false(file, writer)[-1 if is_refused else 0 :]
        flags = inplace_attribute_false(file)
        kept = changes if len(changes) <= _MOST_PLACES else changes[-1:]
        for change in (*kept, *(() if flags is None else (flags,))):
            fix = blocks.fix("disable_inplace_module", changed_lines(file, change), writer=writer)
            found.append(fix)
    return tuple(found)


def _layer_of(diagnosis: Diagnosis) -> str | None:
    """``ReLU`` of a stack that ends in PyTorch's own ``ReLU.forward``."""
    for label in blocks.labels(diagnosis, "written"):
        for frame in reversed(label.site.frames):
            layer, _, method = frame.function.rpartition(".")
            if frame.is_user:
                break
            if method == "forward" and layer:
                return layer
    return None


def _files(diagnosis: Diagnosis) -> list[str]:
    """The user's files in the stacks, those nearest to the write first."""
    labels = (*blocks.labels(diagnosis, "written"), *blocks.labels(diagnosis, "saved", "used"))
    frames = [frame for label in labels for frame in reversed(label.site.frames) if frame.is_user]
    return list(dict.fromkeys(frame.file for frame in frames))


def disable_fused(diagnosis: Diagnosis) -> tuple[Fix, ...]:
    """``fused=False`` where a file of the stacks makes an optimizer of the class whose step wrote."""
    if diagnosis.cause != "fused_optimizer":
        return ()
    classes = {label.op.partition(".")[0] for label in blocks.labels(diagnosis, "written") if label.op}
    lines = blocks.lines_in_files(diagnosis, lambda source: _unfused(source, classes))
    return (blocks.fix("disable_fused", lines),) if lines else ()


def _unfused(source: SourceFile, classes: set[str]) -> Change | None:
    edits = [
        Edit(source.span(keyword.value), "False")
        for call in source.nodes
        if isinstance(call, ast.Call) and leaf_name(call.func) in classes
        for keyword in call.keywords
        if keyword.arg == "fused" and isinstance(keyword.value, ast.Constant) and keyword.value.value is True
    ]
    return edited(source, edits, "disable_fused")


_CALLED = frozenset({"checkpoint", "checkpoint_sequential"})


def not_reentrant(diagnosis: Diagnosis) -> tuple[Fix, ...]:
    """``use_reentrant=False`` in every call of checkpoint that the labels name, where the diagnosis advises it."""
    advice = blocks.advice(diagnosis, "not_reentrant")
    if advice is None:
        return ()
    calls = {call: source for label in diagnosis.labels for source, call in _calls(label)}
    lines: list[tuple[str, int, str]] = []
    for source in dict.fromkeys(calls.values()):
        own = [call for call, where in calls.items() if where is source]
        edits = [with_keyword(source, call, "use_reentrant", "False") for call in own]
        change = edited(source, [edit for edit in edits if edit is not None], "not_reentrant")
        lines += changed_lines(source.file, change)
    return (replace(advice, lines=tuple(lines), applicability="review"),) if lines else ()


def _calls(label: Label) -> list[tuple[SourceFile, ast.Call]]:
    return [
        (place.source, place.node)
        for frame in (label.frame, *(one for one in label.site.frames if one.is_user))
        for place in expressions_at(frame)
        if isinstance(place.node, ast.Call) and leaf_name(place.node.func) in _CALLED
    ]


_STATIC_GRAPH, _KEEP_BUFFERS_LOCAL = "static_graph", "keep_buffers_local"


def find_unused_parameters_in_ddp(diagnosis: Diagnosis) -> tuple[Fix, ...]:
    """The advised argument, at every place where a file of the diagnosis's stacks wraps a module."""
    found: list[Fix] = []
    for kind in (_STATIC_GRAPH, _KEEP_BUFFERS_LOCAL):
        if blocks.advice(diagnosis, kind) is None:
            continue
        lines = blocks.lines_in_files(diagnosis, partial(_described, kind=kind))
        if lines:
            found.append(blocks.fix(kind, lines))
    return tuple(found)


def _described(source: SourceFile, kind: str) -> Change | None:
    called = [node for node in source.nodes if isinstance(node, ast.Call)]
    calls = [node for node in called if wraps_for_ranks(leaf_name(node.func) or "")]
    edits = [edit for call in calls if (edit := with_keyword(source, call, *_argument(call, kind))) is not None]
    return edited(source, edits, kind)


def _argument(call: ast.Call, kind: str) -> tuple[str, str]:
    if kind == _STATIC_GRAPH:
        return "static_graph", "True"
    is_named = any(keyword.arg == "broadcast_buffers" for keyword in call.keywords)
    return ("forward_sync_buffers" if _knows_forward_sync() and not is_named else "broadcast_buffers"), "False"


def _knows_forward_sync() -> bool:
    """Whether the program's torch has the argument that replaces ``broadcast_buffers`` since 2.12."""
    parallel = getattr(sys.modules.get("torch.nn.parallel"), "DistributedDataParallel", None)
    return parallel is not None and "forward_sync_buffers" in inspect.signature(parallel).parameters


_OLD_HOOK, _NEW_HOOK = "register_backward_hook", "register_full_backward_hook"
_TAKES_METHOD = (ast.Name, ast.Attribute, ast.Subscript, ast.Call)


def change_call(diagnosis: Diagnosis) -> tuple[Fix, ...]:
    """The advice of the diagnosis, with the line, where the call alone determines it."""
    found: list[Fix] = []
    for kind, change in _CHANGES.items():
        advice = blocks.advice(diagnosis, kind)
        for label in blocks.labels(diagnosis, "written", "used", "note") if advice is not None else ():
            lines = change(label)
            if lines and advice is not None:
                found.append(replace(advice, lines=lines, applicability="review"))
                break
    return tuple(found)


def _calls_stopped(label: Label) -> Iterator[tuple[Expression, ast.Call]]:
    for place in expressions_at(label.frame):
        if isinstance(place.node, ast.Call):
            yield place, place.node


def _with_edit(label: Label, edit: Callable[[SourceFile, ast.Call], Edit | None]) -> Lines:
    edits = [
        (place.source, one) for place, call in _calls_stopped(label) if (one := edit(place.source, call)) is not None
    ]
    change = edited(edits[0][0], [edits[0][1]], "change_call") if len(edits) == 1 else None
    return changed_lines(label.frame.file, change)


def _detached_to_read(label: Label) -> Lines:
    """``x.detach().numpy()`` for ``x.numpy()``, ``np.asarray(x.detach())`` for ``np.asarray(x)``."""

    def edit(source: SourceFile, call: ast.Call) -> Edit | None:
        is_method = isinstance(call.func, ast.Attribute) and call.func.attr in ("numpy", "apply_", "map_", "__array__")
        value = call.func.value if isinstance(call.func, ast.Attribute) and is_method else next(iter(call.args), None)
        return _behind(source, value, ".detach()")

    return _with_edit(label, edit)


def _detached_copy(label: Label) -> Lines:
    """``x.detach().clone()`` for ``copy.deepcopy(x)``; for a ``net`` with a result in ``net.h``, that detached."""
    name = label.message.values.get("name")
    calls = [(place, call) for place, call in _calls_stopped(label) if leaf_name(call.func) == "deepcopy" and call.args]
    place, copied = (calls[0][0], calls[0][0].source.text(calls[0][1].args[0])) if len(calls) == 1 else (None, "")
    if not isinstance(name, str):
        return ()
    if place is not None and name != copied:
        beside = label.message.values.get("copied_beside")
        names = [name, *(map(str, beside) if isinstance(beside, list | tuple) else ())]
        names = [re.sub(r"\.(\d+)\b", r"[\1]", one) for one in names]
        names = [one for one in names if one.startswith((f"{copied}.", f"{copied}["))]
        if any(re.fullmatch(rf"{re.escape(copied)}(\.\w+|\[(\d+|\"\w+\"|'\w+')\])+", one) is None for one in names):
            return ()
        # What the copy gets for that tensor: the model keeps the one with the graph, which a loss may still need.
        given = f"{{{', '.join(f'id({one}): {one}.detach().clone()' for one in names)}}}"
        if not names or len(calls[0][1].args) > 1 or calls[0][1].keywords:
            return ()
        change = edited(place.source, [Edit.after(place.source.span(calls[0][1].args[0]), f", {given}")], "change_call")
        return changed_lines(label.frame.file, change)

    return _copied_by(label, "detach().clone()")


def _copied_by(label: Label, methods: str) -> Lines:
    def edit(source: SourceFile, call: ast.Call) -> Edit | None:
        value = call.args[0] if len(call.args) == 1 and leaf_name(call.func) == "deepcopy" else None
        if value is None or not isinstance(value, _TAKES_METHOD):
            return None
        return Edit(source.span(call), f"{source.text(value)}.{methods}")

    return _with_edit(label, edit)


def _flag_left_out(label: Label) -> Lines:
    """The removal of ``x.requires_grad_()``, or of ``x.requires_grad = True``."""
    place = _setting_flag(label)
    if place is None or len(place.block) < 2:
        return ()
    return blocks.lines_changed(place.source, blocks.removed(place.source, place.statement))


def _result_detached(label: Label) -> Lines:
    """``x = x.detach()`` for ``x.requires_grad_(False)`` and for ``x.requires_grad = False``."""
    place, name = _setting_flag(label), label.message.values.get("name")
    made = definition_of(label.frame, name) if isinstance(name, str) else None
    # Bound anew, the variable of a loop would not change what the loop goes through.
    if place is None or not isinstance(name, str) or (made is not None and made.is_loop):
        return ()
    span = place.source.span(place.statement)
    return changed_lines(
        label.frame.file, edited(place.source, [Edit(span, f"{name} = {name}.detach()")], "change_call")
    )


def _setting_flag(label: Label) -> blocks.Placed | None:
    """The place of a statement that does nothing but set ``requires_grad``."""
    place = next(iter(blocks.placements(label)), None)
    if label.role != "used" or place is None or not is_whole_lines(place.source, place.statement):
        return None
    owner = flag_owner(place.statement)
    return place if owner is not None and place.source.text(owner) == label.message.values.get("name") else None


def _made_floating(label: Label) -> Lines:
    """``.float()`` behind the value that was bound to the tensor's name."""
    name = label.message.values.get("name")
    made = definition_of(label.frame, name) if isinstance(name, str) else None
    place = None if made is None or made.is_loop else statement_at(made.frame)
    if place is None or not isinstance(place.node, ast.Assign) or not isinstance(place.node.targets[0], ast.Name):
        return ()
    edit = _behind(place.source, place.node.value, ".float()")
    return () if edit is None else changed_lines(place.source.file, edited(place.source, [edit], "change_call"))


def _averaged(label: Label) -> Lines:
    """``loss.mean().backward()`` for ``loss.backward()``."""

    def edit(source: SourceFile, call: ast.Call) -> Edit | None:
        is_backward = isinstance(call.func, ast.Attribute) and call.func.attr == "backward" and not call.args
        return (
            _behind(source, call.func.value, ".mean()")
            if is_backward and isinstance(call.func, ast.Attribute)
            else None
        )

    return _with_edit(label, edit)


def _full_hook(label: Label) -> Lines:
    """``register_full_backward_hook`` wherever the file registers the old kind."""
    source = read_source(label.frame.file)
    old = (
        []
        if source is None
        else [source.span(one) for one in source.nodes if isinstance(one, ast.Attribute) and one.attr == _OLD_HOOK]
    )
    edits = [
        Edit(Span(span.end_line, span.end_column - len(_OLD_HOOK), span.end_line, span.end_column), _NEW_HOOK)
        for span in old
    ]
    change = None if source is None else edited(source, edits, "change_call")
    return changed_lines(label.frame.file, change)


def _no_grad_mode(label: Label) -> Lines:
    """``no_grad`` wherever the label's file switches inference mode on."""
    source = read_source(label.frame.file)
    if source is None:
        return ()
    modes = [one for one in source.nodes if leaf_name(one) == "inference_mode"]
    calls = {id(one.func): one for one in source.nodes if isinstance(one, ast.Call)}
    if any(
        isinstance(one, ast.Name) or ((call := calls.get(id(one))) and (call.args or call.keywords)) for one in modes
    ):
        return ()
    spans = [source.span(one) for one in modes]
    length = len("inference_mode")
    edits = [
        Edit(Span(one.end_line, one.end_column - length, one.end_line, one.end_column), "no_grad") for one in spans
    ]
    change = edited(source, edits, "change_call")
    return changed_lines(label.frame.file, change)


def _behind(source: SourceFile, value: ast.expr | None, text: str) -> Edit | None:
    if value is None or not isinstance(value, _TAKES_METHOD):
        return None
    span = source.span(value)
    return Edit.after(span, text)


def _left_out(label: Label) -> Lines:
    """The removal of the statement, where others are in its block."""
    place = next(iter(blocks.placements(label)), None)
    if label.role != "used" or place is None or len(place.block) < 2:
        return ()
    if not isinstance(place.statement, ast.Expr) or not is_whole_lines(place.source, place.statement):
        return ()
    return blocks.lines_changed(place.source, blocks.removed(place.source, place.statement))


_CHANGES: Mapping[str, Callable[[Label], Lines]] = {
    "detach_out_of_place": lambda label: changed_lines(label.frame.file, out_of_place(label.frame, "detach_")),
    "detach_to_read": _detached_to_read,
    "clone_for_copy": partial(_copied_by, methods="clone()"),
    "detach_and_clone": _detached_copy,
    "detach_result": _result_detached,
    "floating_first": _made_floating,
    "leave_flag_out": _flag_left_out,
    "mean_or_sum": _averaged,
    "full_backward_hook": _full_hook,
    "one_backward": _left_out,
    "no_grad_not_inference": _no_grad_mode,
}
"""The function that makes the changed lines, by the kind of the advice."""
