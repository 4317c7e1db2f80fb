"""GS405 and GS702: backward on a loss without a graph, or made a leaf; the operations on the way that detached it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from gradsan import source
from gradsan.diagnose import labels as label_texts
from gradsan.diagnose.failures import parts
from gradsan.model import Clue, Diagnosis, Failure, Fix, Frame, Label, Lines, Message, NamedTensor, Site

_OFF = frozenset({"grad_mode_off", "grad_left_off"})
_MODES = _OFF | {"no_grad", "inference_mode"}
_TITLES = {"gradient": "gradient"}
_MOST_SHOWN = 3


def loss_without_graph(failure: Failure) -> Diagnosis | None:
    """Diagnose every such failure."""
    frames = failure.site.user_frames
    name = _name_of_loss(failure) or Message("label.the_loss")
    used = label_texts.at("used", failure.site, Message("label.loss_at"), op="backward")
    made = source.definition_of(frames[-1], name) if frames and isinstance(name, str) else None
    found = cuts_before(failure) or _returned_cut(failure, name)
    if not found and (asked := _asked_for(failure)):
        return _input_plain(failure, name, asked, made, used)
    if switched_off := _switched_off(failure, made):
        return _trained_no_more(failure, name, switched_off, made, used)
    if not found:
        return _nothing_requires_grad(failure, name, used)
    cuts = _likely(found)
    cut = cuts[0]
    values = {"name": name, "operand": cut.operand}
    explained = "mode" if cut.kind in _MODES else "late" if cut.kind == "set_late" else "cut"
    return parts.diagnosis(
        failure,
        "GS405",
        "loss_without_graph",
        values=values,
        title=f"title.loss_without_graph_{'mode' if cut.kind in _OFF else _TITLES.get(cut.kind, 'cut')}",
        explanation=f"explanation.loss_without_graph_{explained}",
        labels=(*cuts_in_order(cuts), *used),
        tensor=_tensor(failure, name),
        fixes=undone_cuts(found, out_of_blocks=True),
    )


def _name_of_loss(failure: Failure) -> str | None:
    """The tensor whose backward the user's frame calls; None where a library calls it, or for several."""
    frame, live = failure.site.user_frame, parts.live(failure)
    asked = None if frame is None else source.differentiated(frame)
    if frame is None or asked is not None:
        return asked
    called = source.called_expression(frame) or ""
    receiver, argument = source.method_receiver(frame), source.first_argument(frame)
    known = live[-1].requires_grad if live else {}
    # ``accelerator.backward(loss)``
    is_passed = argument in known and (receiver not in known or not called.endswith(".backward"))
    return (argument if is_passed else receiver) if called.endswith("backward") else None


def _returned_cut(failure: Failure, name: str | Message) -> tuple[source.Cut, ...]:
    """The cuts of a loss that a method of the program has returned to a library, which calls backward."""
    sources, mode = failure.clue("sources"), failure.clue("mode")
    is_on = mode is None or bool(mode.values["grad_enabled"])
    files = None if sources is None or isinstance(name, str) or not is_on else sources.values["files"]
    return source.cuts_of_returned_loss(map(str, files)) if isinstance(files, list | tuple) else ()


def _asked_for(failure: Failure) -> list[str]:
    """The tensors without ``requires_grad`` whose ``.grad`` is read after this backward; empty where one has it."""
    mode, frame, clues = failure.clue("mode"), failure.site.user_frame, parts.live(failure)
    if frame is None or not clues or (mode is not None and not mode.values["grad_enabled"]):
        return []
    names = source.read_gradients(frame)
    known = clues[-1].requires_grad
    return names if all(known.get(one) is False for one in names) else []


def _input_plain(
    failure: Failure, name: str | Message, asked: list[str], made: source.Made | None, used: tuple[Label, ...]
) -> Diagnosis:
    """GS405 where a tensor that is to get a gradient was never told to require one."""
    frame, values = failure.site.user_frame, {"name": name, "input": ", ".join(asked)}
    idle = failure.clue("idle")
    is_held = idle is not None and bool(idle.values.get("are_plain"))
    lines = () if frame is None else source.require_grad_of(frame, asked, where_made=is_held)
    created = label_texts.at("created", Site((made.frame,)), Message("label.nothing_requires_grad")) if made else ()
    return parts.diagnosis(
        failure,
        "GS405",
        "loss_without_graph",
        values=values,
        title="title.loss_without_graph_input",
        explanation="explanation.loss_without_graph_input",
        labels=(*created, *used),
        tensor=_tensor(failure, name),
        fixes=(parts.fix("require_of_input", "changed", values, lines=lines),),
    )


def _switched_off(failure: Failure, made: source.Made | None) -> str | None:
    """The module of the innermost frame that an optimizer has, and none of whose parameters requires grad any more.

    It is only looked for where this backward has run before: a detach in every round would have failed then, too.
    Where only others have run, the optimizer must have nothing else to train, because modules frozen on purpose may
    have been passed to one as well. Of several modules, the one read by the statement which ``made`` the loss. None
    where grad mode is off altogether, or several modules match.
    """
    mode = failure.clue("mode")
    ran_before, others = (failure.clue(name) is not None for name in ("ran_before", "others_ran_before"))
    if not (ran_before or others) or (mode is not None and not mode.values["grad_enabled"]):
        return None
    for clue in reversed(parts.live(failure)):
        names = list(clue.switched_off if ran_before else clue.in_vain)
        if names:
            if len(names) > 1 or not ran_before:
                names = [one for one in names if made and source.switch_on_before(made.frame, one) is not None]
            return names[0] if len(names) == 1 else None
    return None


def _trained_no_more(
    failure: Failure, name: str | Message, module: str, made: source.Made | None, used: tuple[Label, ...]
) -> Diagnosis:
    change = None if made is None else source.switch_on_before(made.frame, module)
    lines = () if change is None or made is None else source.changed_lines(made.frame.file, change)
    values = {"name": name, "module": module}
    created = (
        () if made is None else label_texts.at("created", Site((made.frame,)), Message("label.switched_off", values))
    )
    return parts.diagnosis(
        failure,
        "GS405",
        "loss_without_graph",
        values=values,
        words="loss_without_graph_switched_off",
        labels=(*created, *used),
        tensor=_tensor(failure, name),
        fixes=(parts.fix("switch_on", "changed", values, lines=lines),),
    )


def cuts_before(failure: Failure, wanted: str | None = None) -> tuple[source.Cut, ...]:
    """The cuts on the way to the loss, the likeliest first; those behind which ``wanted`` may be, where it is given."""
    frames = failure.site.user_frames
    live = [
        source.Live(
            {name: known for name, known in clue.requires_grad.items() if wanted is None or name == wanted},
            clue.callees,
        )
        for clue in parts.live(failure)[-len(frames) :]
    ]
    mode = failure.clue("mode")
    is_off = mode is not None and not mode.values["grad_enabled"]
    if is_off and (off := source.grad_switched_off(frames)) is not None:
        return (source.Cut("grad_mode_off", off, "", True),)
    found = _of_trained(source.find_cuts(frames, live), failure) if live and len(live) == len(frames) else ()
    if not is_off or not _MODES.isdisjoint(cut.kind for cut in found):
        return found
    # The function that runs the backward is itself decorated.
    around = source.context_around(frames, frozenset({"no_grad", "inference_mode"}))
    if around is not None and not found:
        name = _name_of_loss(failure) or ""
        made = source.definition_of(frames[-1], name) if name else None
        operand = name if made is None else made.value
        return (source.Cut(around[1], around[0], operand, True),)
    left = source.grad_left_off(frames) if around is None else None
    return found if left is None else (source.Cut("grad_left_off", left, "", True),)


def _of_trained(found: tuple[source.Cut, ...], failure: Failure) -> tuple[source.Cut, ...]:
    """The cuts less those of what networks compute that no optimizer trains, such as a teacher, if others are left."""
    clues = parts.live(failure)
    untrained = {name for clue in clues for name in clue.untrained}
    known = {name for clue in clues for name, requires in clue.requires_grad.items() if requires}
    trained = {name for name in known if name not in untrained and name.partition(".")[0] not in untrained}

    def is_of_trained(cut: source.Cut) -> bool:
        if cut.kind not in _MODES or any(_calls(cut, name) for name in trained):
            return True
        return not any(_calls(cut, name) for name in untrained)

    return tuple(filter(is_of_trained, found)) or found


def _calls(cut: source.Cut, name: str) -> bool:
    return re.search(rf"(?<![\w.]){re.escape(name)}\(", cut.operand) is not None


def cuts_in_order(cuts: tuple[source.Cut, ...]) -> tuple[Label, ...]:
    """A label for each cutting line, in source order where they are in one file."""
    first, *others = cuts
    placed = sorted([first, *others], key=lambda cut: (cut.frame.file != first.frame.file, cut.frame.line))
    return tuple(
        Label(
            "created",
            cut.frame,
            Message(f"label.cut_{cut.kind}", {"operand": cut.operand}),
            cut.kind,
            Site((cut.frame,)),
        )
        for cut in placed
    )


def _likely(found: tuple[source.Cut, ...]) -> tuple[source.Cut, ...]:
    """The first of the cuts, and further ones that are equally certain."""
    likely = {one.frame: one for one in reversed(found) if one.is_certain == found[0].is_certain}
    return tuple(one for one in found if likely.get(one.frame) is one)[:_MOST_SHOWN]


def undone_cuts(found: tuple[source.Cut, ...], *, out_of_blocks: bool = False) -> tuple[Fix, ...]:
    """A fix for each of the likeliest cuts of ``find_cuts``; with its line where the cut is unambiguous.

    With ``out_of_blocks`` a statement leaves a ``with torch.no_grad():`` that others are in.
    """
    fixes = [_fix(one, _is_the_one(one, found), out_of_blocks) for one in (_likely(found) if found else ())]
    if fixes and (lines := _numbers_undone(found)):
        return (replace(fixes[0], lines=lines),)
    return tuple(sorted(fixes, key=lambda fix: not fix.lines))


def recorded_again(read: Clue, values: Mapping[str, object]) -> tuple[Fix, ...]:
    """The statement at a clue outside of its ``no_grad``; empty where the source does not show how."""
    is_off = read.values.get("how") == "no_grad" and read.site is not None
    lines = source.graph_restored(read.site.user_frames, "no_grad") if is_off and read.site is not None else ()
    how = Message("help.use_it_how", dict(values))
    return (Fix("undo_no_grad", "changed", Message("help.cut_no_grad"), how_changed=how, lines=lines),) if lines else ()


def _numbers_undone(found: tuple[source.Cut, ...]) -> Lines:
    """The lines that keep tensors where all cuts make numbers of them, from which one new tensor is made."""
    around = {cut.covered_by for cut in found if cut.kind == "item"}
    by = around.pop() if len(around) == 1 and all(cut.kind == "item" for cut in found) else None
    if by is None or by[0] != "new_tensor":
        return ()
    return source.undone_numbers([cut.frame for cut in found], by[1])


def _is_the_one(cut: source.Cut, found: tuple[source.Cut, ...]) -> bool:
    """Whether the cut is unambiguous: of several, one may be intended."""
    return not cut.is_covered and all(one.is_covered or one.frame == cut.frame for one in found)


def _fix(cut: source.Cut, is_the_one: bool, out_of_blocks: bool) -> Fix:
    change = source.undone(cut.frame, cut.kind, cut.operand if out_of_blocks else "") if is_the_one else None
    if is_the_one and cut.kind == "data" and out_of_blocks:
        change = source.read_with_graph(cut.frame)
    how = "help.cut_gradient_how" if cut.kind == "gradient" else "help.cut_with_graph_how"
    return Fix(
        kind=f"undo_{cut.kind}",
        meaning="changed",
        summary=Message(f"help.cut_{cut.kind}", {"operand": cut.operand}),
        how_changed=Message(how, {"operand": cut.operand}) if cut.operand else None,
        lines=source.changed_lines(cut.frame.file, change),
    )


def _nothing_requires_grad(failure: Failure, name: str | Message, used: tuple[Label, ...]) -> Diagnosis:
    frames = failure.site.user_frames
    made = source.definition_of(frames[-1], name) if frames and isinstance(name, str) else None
    created: tuple[Label, ...] = ()
    mode = failure.clue("mode")
    is_off = mode is not None and not mode.values["grad_enabled"]
    kind, summary = ("undo_grad_mode_off", "cut_grad_mode_off") if is_off else ("requires_grad_first",) * 2
    is_returned = not is_off and not isinstance(name, str)
    summary = "requires_grad_returned" if is_returned else summary
    idle = None if is_off else failure.clue("idle")
    if idle is not None and idle.name:
        return _frozen_from_start(failure, name, idle, used)
    library = mode.op if mode is not None and is_off else None
    if library is not None and mode is not None and frames:
        return _switched_off_by_library(name, library, bool(mode.values["inference"]), failure, used)
    if made is not None and not is_off and failure.site.shown_frame is not None:
        created = label_texts.at("created", Site((made.frame,)), Message("label.nothing_requires_grad"))
    return parts.diagnosis(
        failure,
        "GS405",
        "loss_without_graph",
        values={"name": name},
        title="title.loss_without_graph_mode" if is_off else None,
        explanation=f"explanation.loss_without_graph_{'off' if is_off else 'returned'}"
        if is_off or is_returned
        else None,
        labels=(*created, *used),
        tensor=_tensor(failure, name),
        fixes=(Fix(kind, "changed", Message(f"help.{summary}", {"operand": name})),),
    )


def _switched_off_by_library(
    name: str | Message, library: str, is_inference: bool, failure: Failure, used: tuple[Label, ...]
) -> Diagnosis:
    """GS405 in a function that a library calls without gradients, as in validation; no line helps in inference mode."""
    frame = failure.site.user_frame
    values = {"name": name, "library": library}
    change = (
        None if is_inference or frame is None else source.with_gradients(frame, name if isinstance(name, str) else "")
    )
    lines = () if change is None or frame is None else source.changed_lines(frame.file, change)
    summary = "help.cut_library_inference" if is_inference else "help.cut_library_mode"
    return parts.diagnosis(
        failure,
        "GS405",
        "loss_without_graph",
        values=values,
        title="title.loss_without_graph_mode",
        explanation="explanation.loss_without_graph_library",
        labels=used,
        tensor=_tensor(failure, name),
        fixes=(parts.fix("undo_grad_mode_off", "changed", values, lines=lines, summary=summary),),
    )


def _frozen_from_start(failure: Failure, name: str | Message, idle: Clue, used: tuple[Label, ...]) -> Diagnosis:
    """GS405 where nothing that an optimizer has requires grad; what was chosen for it is to be trained."""
    values = {"name": name, "parameters": idle.name, "optimizer": idle.op, "others": idle.count("total")}
    optimizer = idle.values.get("optimizer")
    lines: Lines = ()
    is_plain, frame = bool(idle.values.get("are_plain")), failure.site.user_frame
    names = (idle.name or "").split(", ")
    if is_plain and frame is not None and len(names) == idle.count("total"):
        lines = source.require_grad_of(frame, names, where_made=True)
    elif isinstance(optimizer, str) and idle.values.get("are_chosen"):
        lines = source.changed_at(failure.site.user_frame, partial(source.switch_on_before_made, optimizer=optimizer))
    words = "help.require_where_made" if is_plain else None
    return parts.diagnosis(
        failure,
        "GS405",
        "loss_without_graph",
        values=values,
        title="title.loss_without_graph_frozen",
        explanation=f"explanation.loss_without_graph_{'untold' if is_plain else 'frozen'}",
        labels=used,
        tensor=_tensor(failure, name),
        fixes=(parts.fix("switch_on_trained", "changed", values, lines=lines, summary=words),),
    )


def _tensor(failure: Failure, name: str | Message) -> NamedTensor | None:
    loss = failure.clue("loss")
    if loss is None or not isinstance(name, str):
        return None
    return parts.tensor_of(loss, name)


def loss_made_leaf(
    failure: Failure, used: Frame, cuts: tuple[Label, ...], values: Mapping[str, object]
) -> Diagnosis | None:
    """GS702, a warning, for an optimizer without any gradient whose last backward, at ``used``, was that of a leaf."""
    backward = failure.clue("backward")
    if backward is None or "shape" not in backward.values:
        return None
    name = source.method_receiver(used)
    place = None if name is None else source.told_to_require(used, name)
    values = {**values, "name": name or Message("label.the_loss")}
    written = (
        () if place is None else label_texts.at("written", Site((place,)), Message("label.told_to_require", values))
    )
    return parts.diagnosis(
        failure,
        "GS702",
        "loss_made_leaf",
        values=values,
        severity="warning",
        words="loss_made_leaf",
        labels=(
            *cuts,
            *written,
            *label_texts.at("used", backward.site, Message("label.backward_of_leaf", values), op="backward"),
        ),
        tensor=parts.tensor_of(backward, name),
        fixes=(parts.fix("give_loss_a_graph", "changed", values),),
    )
