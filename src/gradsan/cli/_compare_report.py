"""Text of ``gradsan compare``: the verdict, what was compared, what differs, and where it begins."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from gradsan.model import Message
from gradsan.present._places import shown_path
from gradsan.text import Language, say

if TYPE_CHECKING:
    from gradsan.repair.compiled import Compared
    from gradsan.repair.compiled.judging import Difference
    from gradsan.repair.trials.compiling import Fragment, Function

_DIFFERENCES_SHOWN = 6
_OPERATIONS_SHOWN = 6
_RESUMED = "torch_dynamo_resume_in_"


def rendered(compared: Compared, language: Language, cwd: Path | None, *, wrote: str | None) -> str:
    """All that is said; ``wrote`` is the file that was asked for."""
    messages = [_headline(compared), *_details(compared, cwd), *_where(compared, cwd, wrote)]
    lines = [say(messages[0], language), *(f"  {say(one, language)}" for one in messages[1:])]
    return "\n".join(lines) + "\n"


def _headline(compared: Compared) -> Message:
    values: dict[str, object] = {"difference": compared.largest, "allowed": compared.allowed}
    if compared.verdict == "same":
        is_beyond = compared.largest > compared.allowed
        return Message("compare.same_beyond" if is_beyond else "compare.same", values)
    if compared.verdict == "undecided":
        return Message("compare.undecided")
    if not compared.differences:
        return Message("compare.ends_differ")
    return Message("compare.differs", {"what": _named(compared.differences[0])})


def _details(compared: Compared, cwd: Path | None) -> Iterator[Message]:
    yield from compared.reasons
    for one in compared.differences[:_DIFFERENCES_SHOWN]:
        values = {"what": _named(one), "difference": one.size, "allowed": one.allowed}
        if one.eager is None or one.compiled is None:
            yield Message("compare.one_missing", {**values, "which": "compiled" if one.compiled is None else "eager"})
        elif not math.isfinite(one.size):
            yield Message("compare.one_not_finite", {**values, "compiled": one.compiled, "eager": one.eager})
        else:
            yield Message(f"compare.one_{one.what}", {**values, "compiled": one.compiled, "eager": one.eager})
    more = len(compared.differences) - _DIFFERENCES_SHOWN
    if more > 0:
        yield Message("compare.more", {"count": more})
    yield Message(
        "compare.compared",
        {
            "rounds": compared.rounds,
            "losses": compared.losses,
            "gradients": compared.gradients,
            "parameters": compared.parameters,
        },
    )
    names = list(dict.fromkeys(compared.titles))
    shown = ", ".join(names[:_OPERATIONS_SHOWN]) + (", …" if len(names) > _OPERATIONS_SHOWN else "")
    backends = ", ".join(compared.backends)
    yield Message("compare.what_compiled", {"count": compared.graphs, "functions": shown, "backends": backends})
    for doubt in compared.doubts:
        yield Message("compare.note", {"what": doubt})
    for finding in compared.findings:
        yield Message("compare.finding", {"code": finding.code, "title": finding.title})


def _where(compared: Compared, cwd: Path | None, wrote: str | None) -> Iterator[Message]:
    fragment = compared.fragment
    if fragment is not None:
        yield from _of_fragment(fragment, cwd, wrote)
    elif compared.stage == "left_out" and compared.function is not None:
        yield Message("compare.stage_left_out", {"function": _function(compared.function, cwd)})
    elif compared.stage:
        yield Message(f"compare.stage_{compared.stage}")
    if wrote is not None and compared.verdict == "differs" and (fragment is None or not fragment.program):
        yield Message("compare.nothing_to_write")


def _of_fragment(fragment: Fragment, cwd: Path | None, wrote: str | None) -> Iterator[Message]:
    if not fragment.ops:
        yield Message("compare.graph_as_whole", {"function": _function(fragment.function, cwd)})
        return
    if fragment.layer[0]:
        yield Message("compare.layer", {"layer": fragment.layer[0], "kind": fragment.layer[1]})
    ops = ", ".join(fragment.ops[:_OPERATIONS_SHOWN]) + (", …" if len(fragment.ops) > _OPERATIONS_SHOWN else "")
    values = {"ops": ops, "difference": fragment.difference, "allowed": fragment.allowed}
    if fragment.overwritten is not None:
        yield Message("compare.operation_write", values)
    else:
        yield Message("compare.operation_gradient" if fragment.of_gradient else "compare.operation_result", values)
    if fragment.place is not None:
        file, line, text = fragment.place
        yield Message("compare.place", {"place": f"{shown_path(file, cwd)}:{line}", "text": text})
    key = "stage_aot" if fragment.also_aot else "stage_backend"
    yield Message(f"compare.{key}", {"backend": fragment.backend})
    if fragment.program:
        yield Message("compare.wrote", {"file": wrote}) if wrote is not None else Message("compare.how_to_write")


def _named(one: Difference) -> Message:
    return Message(f"compare.name_{one.what}", {"name": one.name, "round": one.round})


def _function(function: Function, cwd: Path | None) -> str:
    file, name = function
    if name.startswith(_RESUMED):
        name = name.removeprefix(_RESUMED).rpartition("_at_")[0]
    return f"{name} ({shown_path(file, cwd)})"
