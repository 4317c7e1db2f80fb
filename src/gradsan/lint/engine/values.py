"""Abstract values of the interpreter: tensors with memory and graph, containers, modules, optimizers, functions.

None is a value of a running program. A ``Tensor`` stands for any tensor that an expression may return, a
``Memory`` for its storage, a ``Node`` for the autograd Node. Whether a gradient flows is known in
three degrees.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from typing import Final, TypeAlias

NO: Final = 0
MAYBE: Final = 1
YES: Final = 2
"""Whether a value requires grad, as far as the source shows."""

NODES_WALKED: Final = 3_000
"""The most Nodes that are looked at from one."""

Branches: TypeAlias = tuple[tuple[int, int], ...]
OPEN_SIDE = -2  # of a choice that the last round of a loop may have made either way
"""The undecided choices around a place: (the choice, its branch), outermost first."""


def words(text: str) -> frozenset[str]:
    """The words of a text."""
    return frozenset(text.split())


class Memory:
    """The storage of a tensor, with its version counter."""

    __slots__ = ()


@dataclass(slots=True, eq=False)
class Site:
    """A place in the source: its syntax, and its function."""

    node: ast.AST
    function: str


@dataclass(slots=True, eq=False)
class Write:
    """A change of memory in place. ``counted`` is False past the version counter (``.data``, NumPy).

    ``shown`` is the operation's source spelling, ``maker`` the place where an in-place layer was made.
    """

    clock: int
    site: Site
    op: str
    kind: str
    branches: Branches
    text: str
    counted: bool = True
    shown: str = ""
    maker: Site | None = None


@dataclass(slots=True, eq=False)
class Saved:
    """A saved tensor of a Node: ``need`` says whether some gradient needs it, ``is_part`` that it is a view."""

    memories: tuple[Memory, ...]
    clock: int
    slot: str
    need: int
    branches: Branches
    is_output: bool = False
    text: str = ""
    is_part: bool = False
    carries: bool = True
    owners: tuple[Value, ...] = ()


@dataclass(slots=True, eq=False)
class Node:
    """An operation in the graph; ``parents`` are Nodes, and leaves as tensors. ``is_opaque``: code not analysed.

    ``is_open``: an operand that is not known may have a graph, too.
    """

    op: str
    parents: tuple[Node | Tensor, ...]
    saved: tuple[Saved, ...]
    site: Site
    clock: int
    grad: int
    is_opaque: bool = False
    is_open: bool = False


@dataclass(slots=True, eq=False)
class Content:
    """The content of a memory since it was written under autograd."""

    clock: int
    node: Node | None
    grad: int


@dataclass(slots=True, eq=False)
class Tensor:
    """A tensor, or (``is_certain`` False) anything: a parameter of a function, the result of code not analysed.

    ``view`` is ``view``, ``expand``, ``pieces`` (one of several views of one call) or ``no_grad`` (taken without
    autograd). ``is_cut``: it is detached (``detach()``). ``owners`` are the modules whose parameter it is.
    For several memories, ``branches_of`` says on which path each of them is its own. ``constant`` is the
    ``autograd.grad`` without a graph that it was computed from, ``terms`` are such constants added to it.
    """

    memories: tuple[Memory, ...]
    grad: int = NO
    node: Node | None = None
    clock: int = 0
    is_leaf: bool = False
    is_certain: bool = True
    view: str = ""
    is_cut: bool = False
    is_counted: bool = True
    is_array: bool = False
    owners: tuple[Value, ...] = ()
    text: str = ""
    constant: Site | None = None
    is_reduced: bool = False
    terms: frozenset[Site] = frozenset()
    branches_of: dict[Memory, Branches] | None = None


@dataclass(slots=True, eq=False)
class Plain:
    """A number, a string, None, or anything else without a tensor; ``known`` says whether ``value`` is its value."""

    value: object = None
    known: bool = False


@dataclass(slots=True, eq=False)
class Sequence:
    """A list, tuple or set; its elements are in the state."""

    kind: str


@dataclass(slots=True, eq=False)
class Dictionary:
    """A dict; its entries are in the state."""


@dataclass(slots=True, eq=False)
class Path:
    """A dotted name of a library: ``torch.nn.functional.relu``."""

    name: str


@dataclass(slots=True, eq=False)
class Function:
    """A function of the file: its syntax, the frames around its definition, and its class, if any."""

    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
    chain: tuple[int, ...]
    owner: ClassValue | None = None


@dataclass(slots=True, eq=False)
class ClassValue:
    """A class of the file: its syntax, its bases, its functions and the values that its body binds."""

    node: ast.ClassDef
    bases: tuple[Value, ...]
    functions: dict[str, Function] = field(default_factory=dict)
    attributes: dict[str, Value] = field(default_factory=dict)
    is_module: bool = False


@dataclass(slots=True, eq=False)
class Object:
    """An instance of a class of the file; its attributes are in the state."""

    kind: ClassValue


@dataclass(slots=True, eq=False)
class Layer:
    """A module of ``torch.nn`` by its name, the memory of its parameters, and the call that made it."""

    kind: str
    site: Site
    weights: Memory
    inplace: bool = False
    has_weights: bool = False


@dataclass(slots=True, eq=False)
class Bag:
    """A container of modules (``Sequential``, ``ModuleList``, ``ModuleDict``); its items are in the state."""

    kind: str


@dataclass(slots=True, eq=False)
class Optimizer:
    """An optimizer of torch's; its parameters are in the state."""

    kind: str
    site: Site


@dataclass(slots=True, eq=False)
class Parameters:
    """The iterable ``module.parameters()``, or a list built from several. ``shape``: ``item`` or ``pair``."""

    owners: tuple[Value, ...]
    shape: str = "item"


@dataclass(slots=True, eq=False)
class Method:
    """A method by name and its receiver."""

    owner: Value
    name: str
    function: Function | None = None


@dataclass(slots=True, eq=False)
class Choice:
    """One of several values that are not all tensors; the choice is at ``branches``."""

    values: tuple[Value, ...]
    branches: Branches = ()


Value: TypeAlias = (
    Tensor
    | Plain
    | Sequence
    | Dictionary
    | Path
    | Function
    | ClassValue
    | Object
    | Layer
    | Bag
    | Optimizer
    | Parameters
    | Method
    | Choice
)


def is_data(node: Node) -> bool:
    """Whether a Node may as well be none: nothing that is known to have a graph, and no module, went into it.

    ``buffer.sample()`` or ``transform(data)`` returns data far more often than a graph.
    """
    pending: list[Node | Tensor] = [node]
    for one in pending:
        if one.grad == YES or len(pending) > NODES_WALKED:
            return False
        if isinstance(one, Tensor):
            if one.is_leaf or (one.is_certain and not one.owners) or _may_be_model(one.owners):
                return False
        elif any(_may_be_model(saved.owners) for saved in one.saved):
            return False
        else:
            pending += one.parents
    return True


def prove(graph: Node) -> None:
    """Note that a Node is there: a call of which it is a part has returned a graph.

    Where one value alone can have given it one, the Nodes in between are there, too, and need what they have saved.
    """
    graph.grad = YES
    for parent in graph.parents if graph.op == "part" else ():
        if isinstance(parent, Node):
            prove(parent)
    found, sources = [graph], set[Node | Tensor]()
    for node in found:
        if node.op == "either" or node.is_open or len(found) > NODES_WALKED:
            return
        if node.is_opaque or not node.parents:
            sources.add(node)
            continue
        sources.update(one for one in node.parents if isinstance(one, Tensor))
        found += [one for one in dict.fromkeys(node.parents) if isinstance(one, Node) and one not in found]
    if len(sources) == 1:
        for node in found:
            node.grad = YES
            for saved in node.saved:
                saved.need = YES


def _may_be_model(owners: tuple[Value, ...]) -> bool:
    """Whether a caller gave one; what is made here by a library, and has no optimizer, is a transform or a loss."""
    return any(not isinstance(one, Tensor) or one.node is None or not one.node.is_opaque for one in owners)
