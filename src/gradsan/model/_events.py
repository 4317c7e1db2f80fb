"""Events of a run and clues to its failures: the evidence that a diagnosis is based on."""

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
    """A tensor that autograd kept for backward.

    ``node`` is the autograd Node that keeps it (``AddmmBackward0``), ``slot`` the name of the place in it
    (``mat2``, ``result``); ``is_output`` says that the tensor is a result of that very operation.
    ``sequence`` is PyTorch's sequence number when the save happened, ``step`` the number of optimizer steps
    finished before it. ``compiled`` is set where a compiled graph saved it: ``inside`` where the backward of eager code
    needs the value, too, ``again`` where only the compiled graph recomputes something from it, ``only`` where that
    backward computes nothing from it, and the graph keeps it for another result.
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
    """A change in place of a storage's memory.

    ``op`` is the called operation (``add_``, ``__setitem__``, ``SGD.step``). ``version`` is the version counter of the
    written tensor right after the write, None where it was not read. ``region`` is None where it is unknown which
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
    """An unpack of a saved tensor by backward; the site is the call that started that backward.

    ``via`` is ``backward`` or ``grad``; ``write`` where no backward has asked for the value yet: the conflict was found
    at the write, and there is no site.
    """

    clock: int
    site: Site
    version: int
    step: int = 0
    retain_graph: bool | None = None
    via: str = "backward"


@dataclass(frozen=True, slots=True)
class Name:
    """A name of a tensor in the program, and its origin.

    ``origin``: ``variable`` (found in a live frame), ``module`` (parameter or buffer of a module found alive),
    ``source`` (read from the source of the write or the save).
    """

    text: str
    origin: Literal["variable", "module", "source"]
    kind: Literal["parameter", "buffer", "data", "value"] = "value"


@dataclass(frozen=True, slots=True)
class Layer:
    """A container or object that holds a tensor: ``path``, its expression; ``kind``, as in :class:`Held`.

    ``items`` are the kinds of its items, each once: ``tensor``, ``none``, ``other`` or kinds of containers; empty for
    an object. ``is_frozen``: a dataclass whose fields cannot be assigned. ``made_by`` is an object's class: file, name.
    """

    path: str
    kind: str
    items: tuple[str, ...] = ()
    is_frozen: bool = False
    made_by: tuple[str, str] = ("", "")


@dataclass(frozen=True, slots=True)
class Held:
    """A live variable whose graph leads back to the overwritten value.

    ``path`` is the expression as written in the function ``function`` of ``file`` (``<module>`` for a global).
    ``within`` is the expression that the tensor is an element or attribute of, ``container`` its type: ``tuple``,
    ``namedtuple``, ``list``, ``deque``, ``dict``, ``defaultdict`` or ``object``; both None for a variable that is the
    tensor itself. ``is_old`` says that it was made before the write, or before the backward that freed the graph: an
    earlier round left it. ``is_rewritten`` says that it has been written in place. ``around`` lists all containers of
    it, from the variable inwards.
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
    """The tensor by which a new graph depends on an older one.

    ``younger`` and ``older`` are the autograd Nodes at both ends of the crossing edge, ``name`` the expression by which
    a live frame still holds the tensor on it. ``taken_near`` are the sites around the young operation that took it,
    ``made_near`` those around the operation that made it: one where that operation saved something itself, else the
    save before it and the save after it. ``forward_ran_again`` says that the code which saved the overwritten value ran
    again after the write: a loop that carries its state, rather than one forward used after a step.
    ``backward_ran_between`` says that the line of this backward ran between the save and the write, without this part
    of the graph: that is of an earlier round. ``held`` are the live variables whose graph leads back to the overwritten
    value, among them the carried one. ``numbers`` are names of numbers and texts, which carry no state. ``is_term``:
    the tensor enters the loss without being combined with a parameter, as the value of a state, unlike a hidden state.
    ``parameter`` is the name of a parameter that leads to it, as the program has written something with a graph there.
    """

    older: str
    younger: str
    name: str | None = None
    taken_near: tuple[Site, ...] = ()
    made_near: tuple[Site, ...] = ()
    forward_ran_again: bool = False
    held: tuple[Held, ...] = ()
    is_term: bool = False
    numbers: frozenset[str] = frozenset()
    backward_ran_between: bool = False
    parameter: str | None = None


@dataclass(frozen=True, slots=True)
class Passed:
    """An autograd Node that a backward passes on its path to the Node that saved a value.

    ``frame`` is the user's line whose call made it, None where that is unknown; ``is_younger`` says that it was made
    after the first write, or after the backward that freed the graph.
    """

    name: str
    frame: Frame | None = None
    is_younger: bool = False


@dataclass(frozen=True, slots=True)
class ByteChange:
    """Elements of a saved view that were overwritten: their number, and the first few as text.

    ``changed`` of ``total`` elements differ; ``samples`` are (index, value as saved, value at the use).
    """

    changed: int
    total: int
    samples: tuple[tuple[tuple[int, ...], str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Deviation:
    """Distance of the gradient that PyTorch computes from that of the program as written.

    ``errors`` are (name of a parameter or leaf, relative error ``|wrong - right| / |right|`` in the Euclidean norm),
    the largest first. Empty: nothing with a gradient depends on the conflict.
    """

    errors: tuple[tuple[str, float], ...] = ()

    @property
    def largest(self) -> float:
        """The largest relative error, 0.0 where there is none."""
        return max((error for _, error in self.errors), default=0.0)


@dataclass(frozen=True, slots=True)
class Clue:
    """A fact about a failure, labelled by its ``role``.

    Roles are listed in the modules that collect them (``gradsan.errors``): ``leaf``, ``view_made``, ``base_written``,
    ``freed_by``, ``graph_cut`` … ``name`` is the tensor's name in the program, ``op`` the operation or Node, ``site``
    where it happened, ``values`` further plain facts (numbers, strings, booleans, and tuples of them). Facts with more
    structure have a class of their own.
    """

    role: str
    site: Site | None = None
    name: str | None = None
    op: str | None = None
    values: Mapping[str, object] = field(default_factory=dict)

    @property
    def user_frame(self) -> Frame | None:
        """The user frame of its site; None where there is none."""
        return None if self.site is None else self.site.user_frame

    @property
    def shown_frame(self) -> Frame | None:
        """The frame to show of its site; None where there is none."""
        return None if self.site is None else self.site.shown_frame

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of the tensor; empty where they are not known."""
        sizes = self.values.get("shape")
        return tuple(sizes) if isinstance(sizes, tuple | list) else ()

    @property
    def dtype(self) -> str:
        """The dtype of the tensor; ``?`` where it is not known."""
        return str(self.values.get("dtype") or "?")

    @property
    def device(self) -> str:
        """The device of the tensor; ``?`` where it is not known."""
        return str(self.values.get("device") or "?")

    def count(self, fact: str) -> int:
        """Return the value of ``fact`` if it is an integer, else 0."""
        number = self.values.get(fact)
        return number if isinstance(number, int) else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldClue(Clue):
    """A live variable whose graph leads to the freed Node."""

    held: Held


@dataclass(frozen=True, slots=True, kw_only=True)
class PathClue(Clue):
    """The Nodes from the loss to the freed one."""

    passed: tuple[Passed, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveClue(Clue):
    """Live names of one function at a failure.

    ``requires_grad`` says of a tensor, by its name, whether it requires grad, of a module whether any of its parameters
    does; ``callees`` maps callables to the function that runs: (file, first line, name). ``switched_off``
    are the modules of an optimizer of which no parameter requires grad, ``in_vain`` those of them whose
    optimizer has nothing else to train. ``untrained`` are modules that require grad and that no optimizer in sight has,
    where there is one.
    """

    requires_grad: Mapping[str, bool]
    callees: Mapping[str, tuple[str, int, str]]
    switched_off: tuple[str, ...]
    in_vain: tuple[str, ...]
    untrained: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Conflict:
    """A use whose save was followed by a write before the use, with everything known about it.

    ``writes`` are the logged writes to the same storage between save and use, in order, overlapping or not.
    ``unexplained`` counts moves of the version counter that no logged write accounts for. ``root_sequence`` is the
    sequence number of the youngest root of the backward that needed the value. ``raised`` says that PyTorch raises
    here; otherwise the conflict is silent. ``bypass`` is how a silent write passed the counter (``data_attribute``,
    ``numpy_alias``, ``fused_optimizer`` …: the slug of the GS2xx cause), ``alias_site`` where the alias of the memory
    was made (the ``.data``, the ``.numpy()``). ``change`` and ``deviation`` are known in deep mode; ``healed_bytes``
    says how much was copied to give backward the original, None where it was not given. ``unchanged`` says that bytes
    were compared and none of the saved view differs: the counter moved although no value changed. ``compared`` is watch
    mode's answer, where it has a copy: ``near`` differs by rounding only. ``rebound`` is (old referent of a name, new
    one) where nothing was written and a name was rebound between forward and recomputation. ``function_site`` is the
    definition of the function concerned: the checkpointed one, or the forward of a custom Function. ``certain`` is
    False where only a comparison of values, as in deep mode, could tell whether the gradient differs. ``confidence`` is
    how well save and writes are known: ``recorded``, or inferred from the remains of a run that nobody watched.
    ``also_saved_at`` are further places that may have saved the value then, likeliest first. ``borrowed`` are the
    tensors by which the loss depends on networks trained only by optimizers that have stepped since; ``retained_at`` is
    the one backward since the save that kept its graph. ``for_others`` says that it needs the value for parameters of
    such networks alone, through tensors that other losses use, too. ``passed`` are the Nodes of a shortest path from
    the loss to the one that kept the value, that one last; empty where the path is not known. ``collected_in`` is the
    live container that holds the written tensor itself several times. ``if_meant`` is the distance of the gradients
    from those of a computation that includes the writes, where that was measured. ``further`` are conflicts of other
    memory at which this backward would have stopped next.
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
    bypass: str | None = None
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
    for_others: bool = False
    passed: tuple[Passed, ...] = ()
    collected_in: str | None = None
    if_meant: Deviation | None = None
    further: tuple[Conflict, ...] = ()

    @property
    def is_harmless(self) -> bool:
        """Whether it was measured that every gradient is the same as with the saved value."""
        return self.deviation is not None and not self.deviation.errors


@dataclass(frozen=True, slots=True)
class Copies:
    """The peak memory of copies of saved values on a device, and the number of values that were not copied."""

    device: str
    bytes: int
    left_out: int


@dataclass(frozen=True, slots=True)
class Seen:
    """Extent of the watched run: counts of events and processes, and blind spots (keys of texts)."""

    saves: int = 0
    writes: int = 0
    backwards: int = 0
    steps: int = 0
    processes: int = 1
    copies: tuple[Copies, ...] = ()
    blind_spots: tuple[Message, ...] = ()


@dataclass(frozen=True, slots=True)
class Failure:
    """An error or warning of autograd other than the version check's, or a fault of this kind without a message.

    ``row`` is the row of ``gradsan/catalogue`` it was recognised as (``leaf_inplace``), ``kind`` the exception's class,
    ``message`` PyTorch's words, both empty where PyTorch said nothing; ``values`` the groups of the row's pattern in
    ``message``. ``site`` is where it was raised; ``raised`` is False for warnings and for what PyTorch does not report.
    ``confidence`` as in :class:`Conflict`. ``if_meant`` is the distance, measured in deep mode, of the gradients from
    those of what was presumably meant.
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

    def clue(self, role: str) -> Clue | None:
        """Return the first clue with a role."""
        return next(iter(self.clues_of(role)), None)

    def clues_of(self, role: str) -> tuple[Clue, ...]:
        """Return all clues with a role, in the order in which they were gathered."""
        return tuple(one for one in self.clues if one.role == role)


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
    """Everything that recording hands to diagnosis. ``moments`` are the last steps and backward calls, by clock."""

    conflicts: tuple[Conflict, ...] = ()
    failures: tuple[Failure, ...] = ()
    seen: Seen = field(default_factory=Seen)
    moments: tuple[Moment, ...] = ()
    nonfinite: tuple[NonFinite, ...] = ()
