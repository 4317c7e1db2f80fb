"""GS405: backward on a loss without a graph; which operation on the way to it cut the graph off."""

from __future__ import annotations

from gradsan import source
from gradsan.diagnose import labels as label_texts
from gradsan.diagnose.failures import parts
from gradsan.diagnose.levels import place, user_frames
from gradsan.model import Diagnosis, Failure, Fix, Label, Message, NamedTensor, Site

LOSS_WITHOUT_GRAPH_ROWS = ("no_graph",)

_MODES = frozenset({"no_grad", "inference_mode", "grad_mode_off"})
_MOST_SHOWN = 3


def loss_without_graph(failure: Failure) -> Diagnosis | None:
    """Every such failure."""
    frames = user_frames(failure.site)
    name = (source.method_receiver(frames[-1]) if frames else None) or Message("label.the_loss")
    cuts = _cuts(failure)
    used = label_texts.at("used", failure.site, Message("label.loss_at"), op="backward")
    if not cuts:
        return _nothing_requires_grad(failure, name, used)
    cut = cuts[0]
    values = {"name": name, "operand": cut.operand}
    explained = "mode" if cut.kind in _MODES else "late" if cut.kind == "set_late" else "cut"
    return parts.diagnosis(
        failure,
        "GS405",
        "loss_without_graph",
        values=values,
        title="title.loss_without_graph" if cut.kind == "grad_mode_off" else "title.loss_without_graph_cut",
        explanation=f"explanation.loss_without_graph_{explained}",
        labels=(*_in_order(cuts), *used),
        tensor=_tensor(failure, name),
        fixes=tuple(_fix(one) for one in cuts),
    )


def _cuts(failure: Failure) -> tuple[source.Cut, ...]:
    """The likeliest cut, and further ones that are as certain."""
    frames = user_frames(failure.site)
    live = [
        source.Live(clue.values["requires_grad"], clue.values["callees"])
        for clue in parts.clues(failure, "live")[-len(frames) :]
    ]
    mode = parts.clue(failure, "mode")
    if mode is not None and not mode.values["grad_enabled"]:
        off = source.grad_switched_off(frames)
        if off is not None:
            return (source.Cut("grad_mode_off", off, "", True),)
    found = source.find_cuts(frames, live) if live and len(live) == len(frames) else ()
    likely = {one.frame: one for one in reversed(found) if one.is_certain == found[0].is_certain}
    return tuple(one for one in found if likely.get(one.frame) is one)[:_MOST_SHOWN]


def _in_order(cuts: tuple[source.Cut, ...]) -> tuple[Label, ...]:
    """A label for each line that cuts, in the order of the source where they lie in one file."""
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


def _fix(cut: source.Cut) -> Fix:
    return Fix(
        kind=f"undo_{cut.kind}",
        meaning="changed",
        summary=Message(f"help.cut_{cut.kind}", {"operand": cut.operand}),
        how_changed=Message("help.cut_with_graph_how", {"operand": cut.operand}) if cut.operand else None,
    )


def _nothing_requires_grad(failure: Failure, name: str | Message, used: tuple[Label, ...]) -> Diagnosis:
    frames = user_frames(failure.site)
    made = source.definition_of(frames[-1], name) if frames and isinstance(name, str) else None
    created: tuple[Label, ...] = ()
    if made is not None and place(failure.site) is not None:
        created = label_texts.at("created", Site((made.frame,)), Message("label.nothing_requires_grad"))
    return parts.diagnosis(
        failure,
        "GS405",
        "loss_without_graph",
        values={"name": name},
        labels=(*created, *used),
        tensor=_tensor(failure, name),
        fixes=(Fix("requires_grad_first", "changed", Message("help.requires_grad_first")),),
    )


def _tensor(failure: Failure, name: str | Message) -> NamedTensor | None:
    loss = parts.clue(failure, "loss")
    if loss is None or not isinstance(name, str):
        return None
    return NamedTensor(name, loss.values["shape"], loss.values["dtype"], loss.values["device"], None, None)
