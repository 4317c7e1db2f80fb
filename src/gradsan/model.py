"""The vocabulary of gradsan as plain, frozen data.

Everything that leaves the capture room and everything that reaches a presenter is made of these classes. They
hold no tensor, no frame and no torch object, so they can be written by hand in a test, sent to another process
and kept for ever. Terms are those of ``docs/architecture.md``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Severity = Literal["error", "warning", "note"]
Role = Literal["saved", "written", "used", "bridge", "created", "freed", "suspect", "note"]
WriteKind = Literal["inplace", "setitem", "out", "foreach", "step", "metadata", "op"]
Outcome = Literal["failed", "finished"]
GradientStatus = Literal["raised", "wrong", "right", "unknown"]
Applicability = Literal["automatic", "review", "manual"]


@dataclass(frozen=True, slots=True)
class Message:
    """A sentence by its key in ``gradsan/text/<language>/*.toml`` and the values that fill it.

    Words live in the text room only; a Message becomes a ``str`` when a presenter asks for it in a language.
    A value may itself be a Message.
    """

    key: str
    values: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Frame:
    """One line of a stack: where a function stood when the stack was taken.

    ``file`` is absolute (or ``<string>``-like); ``line`` and ``end_line`` count from 1; ``column`` and
    ``end_column`` count characters from 1, the end being exclusive, and are None where Python does not know them.
    ``is_user`` tells the user's own code from the standard library, installed packages and gradsan itself.
    """

    file: str
    line: int
    function: str
    column: int | None = None
    end_line: int | None = None
    end_column: int | None = None
    is_user: bool = False


@dataclass(frozen=True, slots=True)
class Site:
    """A stack of frames, outermost first."""

    frames: tuple[Frame, ...] = ()

    @property
    def user_frame(self) -> Frame | None:
        """The deepest frame of the user's own code, or None where the stack has none."""
        return next((frame for frame in reversed(self.frames) if frame.is_user), None)


@dataclass(frozen=True, slots=True)
class Region:
    """Which elements of a storage a tensor covers: a strided box, in elements of ``itemsize`` bytes.

    ``index`` narrows the box to the part a basic ``tensor[index] = value`` wrote (a tuple of ``int``, ``slice``,
    ``None`` and ``...``); it is None where the whole box was written or the index was a tensor.
    """

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int
    index: tuple[Any, ...] | None = None


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What a tensor was, without the tensor. ``storage`` identifies its memory within one run."""

    shape: tuple[int, ...]
    dtype: str
    device: str
    storage: int
    region: Region
    requires_grad: bool = False
    is_leaf: bool = True


@dataclass(frozen=True, slots=True)
class Save:
    """Autograd kept a tensor for backward.

    ``node`` is the autograd Node that keeps it (``AddmmBackward0``), ``slot`` the name of the place in it
    (``mat2``, ``result``); ``is_output`` says that the tensor is a result of that very operation.
    ``sequence`` is PyTorch's sequence number when the save happened, ``step`` the number of optimizer steps
    finished before it.
    """

    clock: int
    site: Site
    tensor: TensorInfo
    version: int
    node: str | None = None
    slot: str | None = None
    is_output: bool = False
    sequence: int = 0
    step: int = 0


@dataclass(frozen=True, slots=True)
class Write:
    """Memory of a storage was changed in place.

    ``op`` is what was called (``add_``, ``__setitem__``, ``SGD.step``). ``version`` is the version counter of the
    written tensor right after the write, None where it was not read. ``region`` is None where it is not known which
    part was written. ``is_parameter`` marks a leaf that requires grad written under ``no_grad``: an update.
    """

    clock: int
    site: Site
    op: str
    kind: WriteKind
    version: int | None
    region: Region | None
    sequence: int = 0
    step: int = 0
    grad_enabled: bool = True
    is_parameter: bool = False
    optimizer: str | None = None


@dataclass(frozen=True, slots=True)
class Use:
    """Backward unpacked a saved tensor; the site is the call that started that backward."""

    clock: int
    site: Site
    version: int
    step: int = 0
    retain_graph: bool | None = None
    via: str = "backward"


@dataclass(frozen=True, slots=True)
class Name:
    """What a person would call a tensor, and how gradsan knows.

    ``origin``: ``variable`` (found in a live frame), ``module`` (parameter or buffer of a module found alive),
    ``source`` (read from the source of the write or the save).
    """

    text: str
    origin: Literal["variable", "module", "source"]
    kind: Literal["parameter", "buffer", "data", "value"] = "value"


@dataclass(frozen=True, slots=True)
class Held:
    """A live variable whose graph leads back to the overwritten value.

    ``path`` is the expression, as the function ``function`` of ``file`` says it (``<module>`` for a global). ``within``
    is what the tensor is an element or attribute of, ``container`` what that is: ``tuple``, ``namedtuple``, ``list``,
    ``deque``, ``dict`` or ``object``; both None for a variable that is the tensor itself.
    """

    path: str
    file: str
    function: str
    within: str | None = None
    container: str | None = None


@dataclass(frozen=True, slots=True)
class Bridge:
    """The tensor by which a new graph hangs on an older one.

    ``younger`` and ``older`` are the autograd Nodes at both ends of the crossing edge, ``name`` the expression by which
    a live frame still holds the tensor on it. ``taken_near`` are the sites around the young operation that took it,
    ``made_near`` those around the operation that made it: one where that operation saved something itself, else the
    save before it and the save after it. ``forward_ran_again`` says that the code which saved the overwritten value ran
    again after the write: a loop that carries its state, rather than one forward used after a step. ``held`` are the
    live variables from which the graph leads back to the overwritten value, among them what is carried.
    """

    older: str
    younger: str
    name: str | None = None
    taken_near: tuple[Site, ...] = ()
    made_near: tuple[Site, ...] = ()
    forward_ran_again: bool = False
    held: tuple[Held, ...] = ()


@dataclass(frozen=True, slots=True)
class Conflict:
    """A use whose save was followed by a write before the use, with all that is known about it.

    ``writes`` are the logged writes to the same storage between save and use, in order, overlapping or not.
    ``unexplained`` counts moves of the version counter that no logged write accounts for.
    ``root_sequence`` is the sequence number of the youngest root of the backward that needed the value.
    ``raised`` says that PyTorch raises here; otherwise the conflict is silent.
    """

    save: Save
    writes: tuple[Write, ...]
    use: Use
    names: tuple[Name, ...] = ()
    unexplained: int = 0
    root_sequence: int | None = None
    bridge: Bridge | None = None
    raised: bool = True
    under_user_hooks: bool = False
    log_was_cut: bool = False
    count: int = 1


@dataclass(frozen=True, slots=True)
class Seen:
    """How much of the run gradsan saw, and what it could not see (keys into the text room)."""

    saves: int = 0
    writes: int = 0
    backwards: int = 0
    steps: int = 0
    blind_spots: tuple[Message, ...] = ()


@dataclass(frozen=True, slots=True)
class Evidence:
    """All that capture hands to diagnose."""

    conflicts: tuple[Conflict, ...] = ()
    seen: Seen = field(default_factory=Seen)


@dataclass(frozen=True, slots=True)
class Label:
    """A place in the source that takes part in a diagnosis. ``frame`` is the user frame of ``site``."""

    role: Role
    frame: Frame
    message: Message
    op: str | None = None
    site: Site = Site()


@dataclass(frozen=True, slots=True)
class Verification:
    """What was measured when a fix was tried. Ratios and differences are relative; None where not measured."""

    status: Literal["passed", "failed", "not_run"] = "not_run"
    detail: str = ""
    gradient_difference: float | None = None
    time_ratio: float | None = None
    memory_ratio: float | None = None


@dataclass(frozen=True, slots=True)
class Fix:
    """Something to change. ``lines`` are (file, line, new text) for the concrete changed lines, where known."""

    kind: str
    meaning: Literal["preserved", "changed"]
    summary: Message
    how_changed: Message | None = None
    applicability: Applicability = "manual"
    lines: tuple[tuple[str, int, str], ...] = ()
    diff: str = ""
    verification: Verification = Verification()


@dataclass(frozen=True, slots=True)
class NamedTensor:
    """The tensor of a diagnosis as the report shows it."""

    name: str | None
    shape: tuple[int, ...]
    dtype: str
    device: str
    op: str | None
    operand: str | None


@dataclass(frozen=True, slots=True)
class Why:
    """Why backward needs the value: the derivative formula, and a sentence."""

    formula: str | None
    text: Message


@dataclass(frozen=True, slots=True)
class Gradient:
    """What became of the gradient."""

    status: GradientStatus
    relative_error: float | None = None


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """One finding: what happened, where, why, and what to change. Labels come in the order of events."""

    code: str
    cause: str
    severity: Severity
    silent: bool
    title: Message
    explanation: Message
    labels: tuple[Label, ...]
    tensor: NamedTensor | None = None
    why: Why | None = None
    gradient: Gradient = Gradient("unknown")
    fixes: tuple[Fix, ...] = ()
    notes: tuple[Message, ...] = ()
    count: int = 1


@dataclass(frozen=True, slots=True)
class Program:
    """The program that was watched and how it ended. ``exception`` is (type name, message)."""

    argv: tuple[str, ...] = ()
    outcome: Outcome = "finished"
    exception: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """Everything a presenter needs."""

    program: Program
    seen: Seen
    diagnoses: tuple[Diagnosis, ...]
    gradsan: str
    torch: str | None
    python: str
