"""Types of the C extension: the interface of the pure core, and functions on memory."""

from collections.abc import Callable
from typing import Any

from gradsan.record._core_pure import Core as Core
from gradsan.record.raw_stacks import DEPTH_KEPT as DEPTH_KEPT
from gradsan.record.raw_stacks import NODES_KEPT as NODES_KEPT
from gradsan.record.raw_stacks import STACKS_KEPT as STACKS_KEPT
from gradsan.record.raw_stacks import WRITES_KEPT as WRITES_KEPT

def call_alone(function: Callable[..., Any], /, *args: Any) -> Any:
    """Call ``function`` as the first one of a thread: its stack ends with its own frames, at full recursion depth."""

def call_own(function: Callable[..., Any], /, *args: Any) -> Any:
    """Call ``function`` as gradsan's own: no code of the program, signal handlers or finalisers, runs in between."""

def first_nonfinite(address: int, count: int, kind: int, /) -> int:
    """Return the index of the first NaN or Inf among ``count`` numbers at ``address``; -1 where there is none.

    Kinds: 0 float32, 1 float64, 2 float16, 3 bfloat16.
    """

def holds_nonfinite(tensor: Any, /) -> bool | None:
    """Whether a tensor holds NaN or Inf; None where its memory cannot show it, and while modes are on."""

def lend(
    address: int, shape: tuple[int, ...], strides: tuple[int, ...], code: int, bits: int, owner: Any, /
) -> Any: ...
def objects_of(kinds: set[type], /) -> list[Any]:
    """Return the live objects of exactly these classes; the caller has paused the collector."""

class SavedFields:
    """The fields of a saved tensor that deep mode keeps; see :class:`gradsan.originals.originals.Kept`."""

class SavedValues:
    """The live kept values, and hooks; see :func:`gradsan.originals.comparing.saved_values`."""

    pack: Callable[[Any], Any]
    unpack: Callable[[Any], Any]
    is_off: bool
    on_kept: Callable[[Any], None] | None
    count: int

    def __init__(
        self,
        core: Any,
        kind: type,
        pack: Callable[[Any], Any],
        unpack: Callable[[Any], Any],
        exempt: tuple[Any, ...],
        readers: tuple[Any, ...],
    ) -> None: ...
    def add(self, kept: Any, /) -> None: ...
    def live(self) -> list[Any]: ...
    def doubtful(self) -> list[Any]: ...
