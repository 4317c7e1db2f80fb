"""Facts of a conflict: its relevant writes, the tensor's name, the formula that needs it; compiled graphs from outside.

torch.compile makes one operation of a function. The line of the function that saved a value is unknown; the line that
called it is known, and its result's name.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from gradsan import source
from gradsan.diagnose.names import name_of
from gradsan.diagnose.needs import Need, need_of, op_name
from gradsan.model import Conflict, Frame, Message, Save, Site, Write
from gradsan.overlap import covers_itself, overlap

_STARTED_BY = ("/threading.py",)


_FILLS = frozenset({"fill_", "zero_"})


@dataclass(frozen=True, slots=True)
class Facts:
    """The facts by which the causes decide.

    ``writes`` are the relevant ones: they overlap the saved bytes, or it is not known that they do not. ``missed`` are
    the logged writes that only touched other bytes of the storage. ``name`` is the tensor's name, a Message
    where it has no name of its own. ``in_compiled`` says that a compiled graph saved it; ``conflict`` then has the save
    where that graph was called, and ``op`` is the callee. ``by_compiled`` are the clocks of the writes that
    a compiled graph made; their sites are seen from outside, too.
    """

    conflict: Conflict
    writes: tuple[Write, ...]
    missed: tuple[Write, ...]
    name: str | Message
    name_kind: str
    op: str
    need: Need | None
    in_compiled: bool = False
    by_compiled: frozenset[int] = frozenset()

    @property
    def is_false_alarm(self) -> bool:
        """Whether every move of the counter is explained by writes to other bytes or by changes of shape only."""
        conflict = self.conflict
        if conflict.unchanged:
            return True
        return not self.writes and bool(self.missed) and not conflict.unexplained and not conflict.log_was_cut

    @property
    def is_restored(self) -> bool:
        """Whether bytes were compared and equal the saved ones, though some write may have touched them."""
        return self.conflict.unchanged and any(_may_touch(self.conflict, write) for write in self.missed)

    @property
    def is_undone(self) -> bool:
        """Whether values were compared, and the last write has undone the others, except for rounding."""
        return self.conflict.compared == "near" and self._undoes

    @property
    def may_be_undone(self) -> bool:
        """Whether a value may have been restored: it was not compared, and the last write may undo the others."""
        conflict = self.conflict
        is_known = conflict.change or conflict.deviation or conflict.unchanged or conflict.compared
        return not is_known and self._undoes

    @property
    def _undoes(self) -> bool:
        """Whether the last write is of a kind that undoes others: weights swapped for a moment, merged and unmerged.

        It is another statement than theirs that copies, or adds (multiplies) where one of them has added (multiplied).
        """
        *others, last = self.writes or (None,)
        if last is None or any(write.kind in _NEVER_UNDONE for write in self.writes):
            return False
        at, how = _line(last), _kind_of_writing(last.op)
        others_how = {_kind_of_writing(write.op) for write in others if write is not None and _line(write) != at}
        return bool(others_how) and how is not None and (how == "copy" or how in others_how)

    @property
    def writes_within_itself(self) -> bool:
        """Whether a write went to a tensor of which several elements are one number in memory, and was no mere fill."""
        regions = [write.region for write in self.writes if write.op not in _FILLS]
        return any(region is not None and covers_itself(region) for region in regions)

    @property
    def updates(self) -> tuple[Write, ...]:
        """The writes that are parameter updates: optimizer steps, and leaves written where autograd does not record.

        For a leaf that requires grad any successful write is one, whatever its alias (``detach()``).
        """
        is_leaf = self.name_kind == "parameter"
        return tuple(write for write in self.writes if is_update(write) or (is_leaf and not renormalises(write)))

    @property
    def updates_of_all(self) -> tuple[Write, ...]:
        """The updates, and those of the other values at which this backward would have stopped next, one of each stack.

        A loss may need parameters of several optimizers that have all stepped by then: a fix of one would not be one.
        """
        others = [write for one in self.conflict.further for write in examine(one).updates]
        known: dict[object, Write] = {}
        for write in sorted((*self.updates, *others), key=lambda one: one.clock):
            known.setdefault(stack_of(write), write)
        return tuple(known.values())

    @property
    def first(self) -> Write | None:
        """The first relevant write."""
        return self.writes[0] if self.writes else None


_NEVER_UNDONE = ("step", "statistics", "outside", "collective")
_KINDS_OF_WRITING = {
    "copy": ("copy", "setitem", "set", "data =", "index_copy", "masked_scatter"),
    "add": ("add", "iadd", "sub", "isub"),
    "mul": ("mul", "imul", "div", "itruediv"),
}


def stack_of(write: Write) -> tuple[tuple[str, int], ...]:
    """The lines of the user's frames that led to a write, outermost first."""
    return tuple((frame.file, frame.line) for frame in write.site.user_frames)


def _line(write: Write) -> tuple[str, int] | None:
    frame = write.site.shown_frame
    return None if frame is None else (frame.file, frame.line)


def _kind_of_writing(op: str) -> str | None:
    """The kind of a write, which another of its kind may undo."""
    name = op.rpartition("::")[2].removeprefix("_foreach_").strip("_")
    return next((kind for kind, names in _KINDS_OF_WRITING.items() if name in names), None)


def is_update(write: Write) -> bool:
    """Whether a write is an update of a parameter rather than a part of the computation."""
    return write.kind == "step" or (write.is_parameter and not write.grad_enabled)


def renormalises(write: Write) -> bool:
    """Whether an embedding with ``max_norm`` renormalised the rows that it was about to look up."""
    return write.op.rpartition("::")[2].startswith("embedding_renorm_")


def examine(conflict: Conflict) -> Facts:
    """Compute the facts of one conflict."""
    in_compiled = is_compiled(conflict.save)
    conflict = replace(conflict, save=from_outside(conflict.save))
    by_compiled = frozenset(write.clock for write in conflict.writes if is_written_inside(write.site))
    outside = tuple(replace(write, site=written_from_outside(write.site)) for write in conflict.writes)
    conflict = replace(conflict, writes=outside)
    counting: list[Write] = []
    missed: list[Write] = []
    for write in conflict.writes:
        (missed if conflict.unchanged else counting if _may_touch(conflict, write) else missed).append(write)
    name, kind = name_of(conflict, (*counting, *missed))
    if kind == "parameter" and conflict.save.tensor.is_leaf and not conflict.save.tensor.requires_grad:
        kind = "data"
    if in_compiled and name == returned_as(conflict.save):
        conflict = replace(conflict, save=replace(conflict.save, is_output=True))
    save = conflict.save
    op = called(save) if in_compiled else None
    return Facts(
        conflict=conflict,
        writes=tuple(counting),
        missed=tuple(missed),
        name=name,
        name_kind=kind,
        op=op or (op_name(save.node) if save.node else "?"),
        need=need_of(save.node, save.slot.partition("[")[0]) if save.node and save.slot else None,
        in_compiled=in_compiled,
        by_compiled=by_compiled,
    )


def _may_touch(conflict: Conflict, write: Write) -> bool:
    if write.kind == "metadata":
        return False
    if write.region is None:
        return True
    return overlap(conflict.save.tensor.region, write.region)


def writing_thread(facts: Facts) -> str | None:
    """The function of the thread that overwrote a value, where another thread had saved it.

    None where both were the same thread, or cannot be told apart: two threads of Python's own begin alike.
    """
    save = facts.conflict.save.site
    if not save.frames or _began_in_python(save):
        return None
    for write in facts.writes:
        frames = write.site.user_frames
        if frames and _began_in_python(write.site):
            return frames[0].function
    return None


def _began_in_python(site: Site) -> bool:
    """Whether a stack begins where Python starts a thread, rather than at the program's main module."""
    return bool(site.frames) and site.frames[0].file.replace("\\", "/").endswith(_STARTED_BY)


# The autograd Function that torch/_functorch/_aot_autograd makes of forward and backward of a graph.
_NODE = "CompiledFunctionBackward"
_ENTRY = "/torch/_dynamo/eval_frame.py"


def is_compiled(save: Save) -> bool:
    """Whether a compiled graph, not an operation of the program's, saved the value."""
    return save.node == _NODE


def from_outside(save: Save) -> Save:
    """``save`` at the call of the compiled function; unchanged where no compiled graph saved.

    The frames below that call are at the function's first line, whatever it executes.
    """
    if not is_compiled(save):
        return save
    frames = save.site.frames
    entry = (at for at, frame in enumerate(frames) if frame.file.replace("\\", "/").endswith(_ENTRY))
    return replace(save, site=Site(frames[: next(entry, len(frames))]))


def is_written_inside(site: Site) -> bool:
    """Whether a compiled graph made the write at ``site``: its frames are below the program's own innermost one."""
    last = max((at for at, frame in enumerate(site.frames) if frame.is_user), default=-1)
    return last >= 0 and any(frame.file.replace("\\", "/").endswith(_ENTRY) for frame in site.frames[last + 1 :])


def written_from_outside(site: Site) -> Site:
    """The site of a write inside a compiled graph where that graph was called, or resumes after a graph break.

    The frame of a compiled function is at its first line, that of a resumed one at the line of the break.
    """
    if not is_written_inside(site):
        return site
    own = max(at for at, frame in enumerate(site.frames) if frame.is_user)
    if _is_resumed(site.frames[own]):
        return site
    entries = [at for at in range(own) if site.frames[at].file.replace("\\", "/").endswith(_ENTRY)]
    return Site(site.frames[: entries[-1]]) if entries else site


def goes_on_at(site: Site) -> bool:
    """Whether a site is in the resumed part of a compiled function, after a graph break."""
    frame = site.shown_frame
    return frame is not None and _is_resumed(frame)


def _is_resumed(frame: Frame) -> bool:
    return frame.function.rpartition(".")[2].startswith("torch_dynamo_resume_in_")


def called(save: Save) -> str | None:
    """The callee: ``model`` of ``out = model(x)``; None where the source is ambiguous."""
    frame = save.site.shown_frame
    return None if frame is None else source.called_expression(frame)


def returned_as(save: Save) -> str | None:
    """The name of the call's result: ``out`` of ``out = model(x)``; None where the source is ambiguous."""
    frames = save.site.user_frames
    bound = source.bound_name(frames) if frames else None
    return None if bound is None else bound[0]
