"""Alignment of a graph's Nodes with the operations of a script, both in order of creation.

A local alignment (Smith and Waterman, 1981): Nodes without an operation and operations without a Node are
skipped at a cost, and the best continuous stretch around each pair counts. Evidence for a pair: the operation
may make such a Node; both have the same parameter; the live variable that holds the Node's result is the one that the
statement assigns.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass

from gradsan.postmortem.script import Event

_ENDING = re.compile(r"(Backward(Autograd\w+)?\d*\w*|Backward)$")
_BACKENDS = re.compile(r"^(native|cudnn|miopen|mps|mkldnn|thnn|fused)+(?=[a-z])")

_VIEW_NODES = frozenset(
    {
        *("alias", "asstrided", "clone", "copyslices", "detach", "expand", "flatten", "permute", "reshape"),
        *("reshapealias", "select", "slice", "split", "squeeze", "splitwithsizes", "t", "tocopy", "transpose"),
        *("unbind", "unflatten", "unsafesplit", "unsafeview", "unsqueeze", "view"),
    }
)
"""Nodes that only change the view of a tensor: any call may make them beside its own."""

_TABLE = """
    absolute: abs
    bilinear: bmm mul sum add trilinear
    chunk: split slice
    clip clamp: clamp clampmin clampmax
    concat concatenate: cat
    conv1d: convolution squeeze
    conv2d conv3d convtranspose1d convtranspose2d convtranspose3d: convolution
    cosinesimilarity: mul sum clampmin div linalgvectornorm sqrt
    crossentropy: logsoftmax nllloss nllloss2d
    crossentropyloss: logsoftmax nllloss nllloss2d sum mul neg div mean
    divide: div
    dropout: mul div dropout
    einsum: bmm mul sum mm
    eye:
    getitem: slice select index unsqueeze alias
    gru: gru grucell addmm mm sigmoid tanh sub mul add stack cat rnnlayer unbind
    grucell: addmm mm sigmoid tanh sub mul add grucell chunk
    instancenorm: batchnorm repeat
    kldiv: kldiv mul sub log exp xlogy
    l1loss: abs sub mean sum
    linear: addmm mm bmm linear
    lstm: lstm rnnlayer addmm mm sigmoid tanh mul add stack cat unbind
    lstmcell: addmm mm sigmoid tanh mul add lstmcell
    matmul: mm bmm mv dot mul sum
    max: max maximum amax
    mean: mean div sum
    min: min minimum amin
    multiheadattentionforward: addmm bmm softmax mul div baddbmm scaleddotproductattention mean
    multiply: mul
    negative: neg
    nllloss: nllloss nllloss2d
    norm: linalgvectornorm norm
    normalize: linalgvectornorm clampmin div
    rnntanh: rnnlayer addmm mm tanh add stack cat unbind
    rnnrelu: rnnlayer addmm mm relu add stack cat unbind
    rnntanhcell: addmm mm tanh add
    rnnrelucell: addmm mm relu add
    rsub: rsub sub
    scaleddotproductattention: scaleddotproduct mul bmm softmax add
    setitem: copyslices copy fill maskedfill indexput indexputimpl
    square: pow
    sub subtract: sub rsub
    sum: sum add
    truedivide div: div reciprocal mul
    vectornorm: linalgvectornorm
"""
"""Calls, and the Nodes that they make beside those of their own name."""
_MAKES = {
    name: frozenset(nodes.split())
    for names, _, nodes in (row.partition(":") for row in _TABLE.strip().split("\n"))
    for name in names.split()
}


@functools.lru_cache(maxsize=2048)
def op_of_node(name: str) -> str:
    """The operation of a Node: ``addmm`` of ``AddmmBackward0``; a backend's prefix is left out."""
    plain = _ENDING.sub("", name).replace("_", "").lower()
    return _BACKENDS.sub("", plain) if plain not in ("fused",) else plain


@functools.lru_cache(maxsize=4096)
def fits(call: str, node: str) -> bool:
    """Whether the call ``call`` (``sigmoid``, ``__iadd__``) may make the Node ``node`` (``SigmoidBackward0``)."""
    name = call.strip("_").replace("_", "").lower()
    op = op_of_node(node)
    if call.startswith("__i") and call.endswith("__"):
        name = name[1:]
    known = _MAKES.get(name)
    if known is not None and any(op == one or (len(one) > 3 and op.startswith(one)) for one in known):
        return True
    return op == name or (len(name) > 2 and (op.startswith(name) or op.endswith(name)))


@functools.lru_cache(maxsize=2048)
def is_view_node(node: str) -> bool:
    """Whether a Node only changes the view of a tensor."""
    return op_of_node(node) in _VIEW_NODES


_FITS = 2.0
_VIEW = 0.2
_LEAF = 8.0
_NAMED = 5.0
_NODE_PASSED = -1.0
_VIEW_PASSED = -0.1
_EVENT_PASSED = -0.02
_EVENT_PASSED_IN_A_ROW = -0.2
_ENDS_WITH_ROOT = 4.0
_AROUND = -1.5
_SAME_EVENT = -0.5
_NEVER = float("-inf")
_LEAST = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class Made:
    """The known facts of a Node: its name, number, the parameters it was made of, the variables of its result.

    ``holders`` are (file, function, expression) of live variables.
    """

    name: str
    sequence: int
    leaves: frozenset[int] = frozenset()
    holders: frozenset[tuple[str, str, str]] = frozenset()


def pair_score(node: Made, event: Event) -> float:
    """The evidence for ``event`` having made ``node``; minus infinity where it cannot have."""
    if event.kind not in ("op", "write") or not event.records:
        return _NEVER
    if node.leaves and event.leaves and not node.leaves & event.leaves:
        return _NEVER
    fitting = fits(event.name, node.name)
    shares_leaf = bool(node.leaves & event.leaves)
    if event.kind == "write" and is_view_node(node.name) and node.name == "CopySlices":
        fitting = True
    if not fitting and not (is_view_node(node.name) or shares_leaf):
        return _NEVER
    score = _FITS if fitting else _VIEW
    if shares_leaf and fitting:
        score += _LEAF
    elif node.leaves and not event.leaves:
        score -= _FITS
    place = event.place
    if fitting and place is not None and event.bound:
        held = {(place.file, place.function, name) for name in event.bound}
        score += _NAMED if held & node.holders else 0.0
    return score


def places(
    nodes: Sequence[Made],
    events: Sequence[Event],
    repeated: Sequence[tuple[int, int]] = (),
    ends_with_root: bool = False,
) -> list[list[tuple[float, int]]]:
    """For each Node the events that may have made it, best first, each with the score of the best path through both.

    ``repeated`` are stretches of events, (first, end), that may have happened more often. ``ends_with_root`` says that
    the last Node was made shortly before the last event. Of equal events the later comes first: Nodes of earlier
    iterations of a loop have mostly been freed.
    """
    if not nodes or not events:
        return [[] for _ in nodes]
    scores = [[pair_score(node, event) for event in events] for node in nodes]
    width = len(events)
    # Inner loops first; read backwards, a back edge is one as well.
    loops = sorted(set(repeated), key=lambda loop: loop[1] - loop[0])
    before = _best_until(nodes, scores, width, loops)
    turned = [row[::-1] for row in scores[::-1]]
    backwards = [(width - end, width - first) for first, end in loops]
    start = _ENDS_WITH_ROOT if ends_with_root else 0.0
    after = [row[::-1] for row in _best_until(nodes[::-1], turned, width, backwards, start)[::-1]]
    found: list[list[tuple[float, int]]] = []
    for row, own in enumerate(scores):
        ways = [
            (before[row][column] + after[row][column] - score, column)
            for column, score in enumerate(own)
            if score >= _LEAST
        ]
        found.append(sorted(ways, key=lambda pair: (-pair[0], -pair[1])))
    return found


def _best_until(
    nodes: Sequence[Made], scores: list[list[float]], width: int, loops: Sequence[tuple[int, int]], start: float = 0.0
) -> list[list[float]]:
    """For each pair the best score of a stretch that ends with it; minus infinity where there is no such pair."""
    ended: list[list[float]] = []
    # reach[column]: the best stretch that ends before the current Node, at an event not after ``column``.
    reach = [max(0.0, start + column * _EVENT_PASSED) for column in range(width + 1)]
    for row, node in enumerate(nodes):
        follower = nodes[row + 1] if row + 1 < len(nodes) else node
        # Between consecutive numbers no Node was made, so no operation ran either.
        is_next = abs(follower.sequence - node.sequence) == 1
        event_passed = _EVENT_PASSED_IN_A_ROW if is_next else _EVENT_PASSED
        passed = _VIEW_PASSED if is_view_node(node.name) else _NODE_PASSED
        line = [_NEVER] * width
        previous = ended[row - 1] if row else None
        for column in range(width):
            own = scores[row][column]
            if own > _NEVER:
                best = max(0.0, reach[column])
                if previous is not None and previous[column] + _SAME_EVENT > best:
                    best = previous[column] + _SAME_EVENT
                line[column] = own + best
        ended.append(line)
        following = [0.0] * (width + 1)
        for column in range(width):
            following[column + 1] = max(0.0, following[column] + event_passed, reach[column + 1] + passed, line[column])
        for first, end in loops:
            if following[end] + _AROUND > following[first]:
                following[first] = following[end] + _AROUND
                for column in range(first, end):
                    following[column + 1] = max(following[column + 1], following[column] + event_passed)
        reach = following
    return ended
