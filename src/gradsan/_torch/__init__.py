"""Private names of torch that gradsan uses, feature-detected, each with what happens where it is missing.

Nothing outside this package may use a name of torch that starts with an underscore, except ``Tensor._version``,
``Tensor._base`` and ``UntypedStorage._cdata``, which the hot path reads directly.
"""

from __future__ import annotations

from gradsan._torch.compilers import *
from gradsan._torch.engine import *
from gradsan._torch.finite import *
from gradsan._torch.hooks import *
from gradsan._torch.kinds import *
from gradsan._torch.memory import *
from gradsan._torch.modes import *
from gradsan._torch.modules import *
from gradsan._torch.nodes import *
from gradsan._torch.operations import *
from gradsan._torch.saved import *
from gradsan._torch.weak import *
