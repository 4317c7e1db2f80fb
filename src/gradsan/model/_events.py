"""Events of a run, and clues to its failures: the evidence that a diagnosis is made from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from gradsan.model._nonfinite import NonFinite
from gradsan.model._sites import Frame, Message, Region, Site, TensorInfo

Confidence = Literal["recorded", "certain", "likely", "possible"]
WriteKind = Literal[
    "inplace", "setitem", "out", "foreach", "step", "metadata", "op", "collective", "statistics", "outside"
]


@dataclass(frozen=True, slots=True)
class Save:
    """Autograd kept a tensor for backward.

    ``node`` is the autograd Node that keeps it (``AddmmBackward0``), ``slot`` the name of the place in it
    (``mat2``, ``result``); ``is_output`` says that the tensor is a result of that very operation.
    ``sequence`` is PyTorch's sequence number when the save happened, ``step`` the number of optimizer steps
    finished before it. ``compiled`` is set where a compiled graph saved it: ``inside`` where the same backward needs
    the value without the compiler, too, ``again`` where only the compiler computes something from it once more,
    ``only`` where that backward computes nothing from it, and the graph keeps it for another result.
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
    compiled: Literal["", "inside", "again", "only"] = ""


@dataclass(frozen=True, slots=True)
class Write:
    """Memory of a storage was changed in place.

    ``op`` is what was called (``add_``, ``__setitem__``, ``SGD.step``). ``version`` is the version counter of the
    written tensor right after the write, None where it was not read. ``region`` is None where it is not known which
    part was written. ``is_parameter`` marks a leaf that requires grad written under ``no_grad``: an update. The kind
    ``outside`` is memory written without PyTorch (NumPy, a pointer, another process); the site is then where the memory
    was handed out.
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
    """Backward unpacked a saved tensor; the site is the call that started that backward.

    ``via`` is ``backward`` or ``grad``; ``write`` where no backward has asked for the value yet: the conflict was found
    when it was overwritten, and there is no site.
    """

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
class Layer:
    """What a tensor lies in: the expression ``path``, its ``kind`` as in :class:`Held`, the kinds of its ``items``.

    ``items`` are ``tensor``, ``none``, ``other`` or kinds of containers, each once; empty for an object. ``is_frozen``:
    a dataclass whose fields cannot be assigned.
    """

    path: str
    kind: str
    items: tuple[str, ...] = ()
    is_frozen: bool = False


@dataclass(frozen=True, slots=True)
class Held:
    """A live variable whose graph leads back to the overwritten value.

    ``path`` is the expression, as the function ``function`` of ``file`` says it (``<module>`` for a global). ``within``
    is what the tensor is an element or attribute of, ``container`` what that is: ``tuple``, ``namedtuple``, ``list``,
    ``deque``, ``dict`` or ``object``; both None for a variable that is the tensor itself. ``is_old`` says that it was
    made before the write, or before the backward that freed the graph: an earlier round left it. ``is_rewritten`` says
    that it has been written in place. ``around`` is all that it lies in, from the variable inwards.
    """

    path: str
    file: str
    function: str
    within: str | None = None
    container: str | None = None
    is_old: bool = False
    is_rewritten: bool = False
    around: tuple[Layer, ...] = ()


@dataclass(frozen=True, slots=True)
class Bridge:
    """The tensor by which a new graph hangs on an older one.

    ``younger`` and ``older`` are the autograd Nodes at both ends of the crossing edge, ``name`` the expression by which
    a live frame still holds the tensor on it. ``taken_near`` are the sites around the young operation that took it,
    ``made_near`` those around the operation that made it: one where that operation saved something itself, else the
    save before it and the save after it. ``forward_ran_again`` says that the code which saved the overwritten value ran
    again after the write: a loop that carries its state, rather than one forward used after a step. ``held`` are the
    live variables from which the graph leads back to the overwritten value, among them what is carried. ``is_term``:
    the tensor comes to the loss without meeting a parameter, as the value of a state does and a hidden state does not.
    """

    older: str
    younger: str
    name: str | None = None
    taken_near: tuple[Site, ...] = ()
    made_near: tuple[Site, ...] = ()
    forward_ran_again: bool = False
    held: tuple[Held, ...] = ()
    is_term: bool = False


@dataclass(frozen=True, slots=True)
class Passed:
    """An autograd Node that a backward passes on its way to the one that kept a value.

    ``frame`` is the user's line whose call made it, None where that is not known; ``is_younger`` says that it was made
    after the first write, or after the backward that freed the graph.
    """

    name: str
    frame: Frame | None = None
    is_younger: bool = False


@dataclass(frozen=True, slots=True)
class ByteChange:
    """Which elements of a saved view were overwritten: counted, and the first few as text.

    ``changed`` of ``total`` elements differ; ``samples`` are (index, value as saved, value at the use).
    """

    changed: int
    total: int
    samples: tuple[tuple[tuple[int, ...], str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Deviation:
    """How far the gradient that PyTorch computes is from that of the program as written.

    ``errors`` are (name of a parameter or leaf, relative error ``|wrong - right| / |right|`` in the Euclidean norm),
    the largest first. Empty: nothing with a gradient hangs on the conflict.
    """

    errors: tuple[tuple[str, float], ...] = ()

    @property
    def largest(self) -> float:
        """The largest relative error, 0.0 where there is none."""
        return max((error for _, error in self.errors), default=0.0)


@dataclass(frozen=True, slots=True)
class Clue:
    """Something that the detectors found out about a failure, by its ``role``.

    Roles are named where they are gathered (``gradsan.errors``): ``leaf``, ``view_made``, ``base_written``,
    ``freed_by``, ``graph_cut`` … ``name`` is what the tensor is called, ``op`` the operation or Node, ``site`` where it
    happened, ``values`` further plain facts (numbers, strings, booleans, and tuples of them). What has more structure
    has a class of its own.
    """

    role: str
    site: Site | None = None
    name: str | None = None
    op: str | None = None
    values: Mapping[str, object] = field(default_factory=dict)

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of the tensor that it is about; empty where that is not known."""
        sizes = self.values.get("shape")
        return tuple(sizes) if isinstance(sizes, tuple | list) else ()

    @property
    def dtype(self) -> str:
        """The dtype of that tensor; ``?`` where it is not known."""
        return str(self.values.get("dtype") or "?")

    @property
    def device(self) -> str:
        """Its device; ``?`` where it is not known."""
        return str(self.values.get("device") or "?")

    def count(self, fact: str) -> int:
        """A fact that is a number; 0 where there is none."""
        number = self.values.get(fact)
        return number if isinstance(number, int) else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldClue(Clue):
    """A live variable whose graph leads to what was freed."""

    held: Held


@dataclass(frozen=True, slots=True, kw_only=True)
class PathClue(Clue):
    """The Nodes from the loss to the one that was freed."""

    passed: tuple[Passed, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveClue(Clue):
    """What was alive at a failure, in one function.

    ``requires_grad`` says of a tensor by its name whether it requires grad, of a module whether any of its parameters
    does; ``callees`` of what can be called where the function that runs is: (file, first line, name). ``switched_off``
    are the modules that an optimizer has and of which no parameter requires grad, ``in_vain`` those of them whose
    optimizer has nothing else to train.
    """

    requires_grad: Mapping[str, bool]
    callees: Mapping[str, tuple[str, int, str]]
    switched_off: tuple[str, ...]
    in_vain: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Conflict:
    """A use whose save was followed by a write before the use, with all that is known about it.

    ``writes`` are the logged writes to the same storage between save and use, in order, overlapping or not.
    ``unexplained`` counts moves of the version counter that no logged write accounts for.
    ``root_sequence`` is the sequence number of the youngest root of the backward that needed the value.
    ``raised`` says that PyTorch raises here; otherwise the conflict is silent.
    ``way`` is how a silent write passed the counter (``data_attribute``, ``numpy_alias``, ``fused_optimizer`` …: the
    slug of the GS2xx cause), ``alias_site`` where the memory was reached past it (the ``.data``, the ``.numpy()``).
    ``change`` and ``deviation`` are known in deep mode; ``healed_bytes`` says how much was copied to give backward the
    original, None where it was not given. ``unchanged`` says that bytes were compared and none of the saved view
    differs: the counter moved for nothing. ``compared`` is what watch mode knows of it, where it has a copy: ``near``
    differs by rounding only.
    ``rebound`` is (what a name stood for, what it stands for) where nothing was written and a name was bound anew
    between forward and recomputation. ``function_site`` is the definition of the function it is about: the checkpointed
    one, or the forward of a custom Function. ``certain`` is False where only a comparison of values, as deep mode makes
    it, could tell whether the gradient is another.
    ``confidence`` is how well save and writes are known: ``recorded``, or read off what is left of a run that nobody
    watched. ``also_saved_at`` are further places that may have saved the value then, likeliest first.
    ``borrowed`` are the tensors by which the loss hangs on networks that only optimizers which have stepped since
    train; ``retained_at`` is the one backward since the save that kept its graph. ``passed`` are the Nodes of a
    shortest way from the loss to the one that kept the value, that one last; empty where the way is not known.
    ``collected_in`` is the live container that holds the written tensor itself several times. ``if_meant`` is how far
    gradients are from those that there would be if the writes were part of the computation, where that was measured.
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
    way: str | None = None
    alias_site: Site | None = None
    change: ByteChange | None = None
    deviation: Deviation | None = None
    healed_bytes: int | None = None
    unchanged: bool = False
    compared: Literal["same", "near", "different"] | None = None
    rebound: tuple[str, str] | None = None
    function_site: Site | None = None
    certain: bool = True
    confidence: Confidence = "recorded"
    also_saved_at: tuple[Site, ...] = ()
    borrowed: tuple[Bridge, ...] = ()
    retained_at: Site | None = None
    passed: tuple[Passed, ...] = ()
    collected_in: str | None = None
    if_meant: Deviation | None = None


@dataclass(frozen=True, slots=True)
class Copies:
    """The most that copies of saved values took on a device at once, and how many values were not copied."""

    device: str
    bytes: int
    left_out: int


@dataclass(frozen=True, slots=True)
class Seen:
    """How much of the run gradsan saw, in how many processes, and what it could not see (keys of texts)."""

    saves: int = 0
    writes: int = 0
    backwards: int = 0
    steps: int = 0
    blind_spots: tuple[Message, ...] = ()
    processes: int = 1
    copies: tuple[Copies, ...] = ()


@dataclass(frozen=True, slots=True)
class Failure:
    """An error or a warning of autograd's other than the version check's, or a fault of this family without a message.

    ``row`` is the row of ``gradsan/catalogue`` it was recognised as (``leaf_inplace``), ``kind`` the exception's class,
    ``message`` PyTorch's words, both empty where PyTorch said nothing; ``values`` the groups that the row's pattern
    found in them. ``site`` is where it was raised; ``raised`` is False for warnings and for what PyTorch does not
    report. ``confidence`` as in :class:`Conflict`. ``if_meant`` is what deep mode has measured: how far the gradients
    are from those of what was presumably meant.
    """

    row: str
    kind: str
    message: str
    site: Site
    clues: tuple[Clue, ...] = ()
    values: Mapping[str, str] = field(default_factory=dict)
    raised: bool = True
    count: int = 1
    confidence: Confidence = "recorded"
    if_meant: Deviation | None = None


@dataclass(frozen=True, slots=True)
class Moment:
    """A step that ended or a backward call that began; ``step`` is the number of optimizer steps finished before it."""

    kind: Literal["step", "backward"]
    clock: int
    step: int
    op: str
    site: Site


@dataclass(frozen=True, slots=True)
class Evidence:
    """All that capture hands to diagnose. ``moments`` are the run's last steps and backward calls, by the clock."""

    conflicts: tuple[Conflict, ...] = ()
    failures: tuple[Failure, ...] = ()
    seen: Seen = field(default_factory=Seen)
    moments: tuple[Moment, ...] = ()
    nonfinite: tuple[NonFinite, ...] = ()
