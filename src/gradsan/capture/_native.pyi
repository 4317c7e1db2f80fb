"""The C extension shows the interface of the pure core."""

from gradsan.capture._core_pure import DEPTH_KEPT as DEPTH_KEPT
from gradsan.capture._core_pure import NODES_KEPT as NODES_KEPT
from gradsan.capture._core_pure import STACKS_KEPT as STACKS_KEPT
from gradsan.capture._core_pure import WRITES_KEPT as WRITES_KEPT
from gradsan.capture._core_pure import Core as Core
from gradsan.capture._core_pure import Stack as Stack
