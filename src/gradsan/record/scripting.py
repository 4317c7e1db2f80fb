"""``torch.jit.script`` and replaced functions: scripts are compiled from torch's own.

Behind some of these names (``F.relu``, ``F.batch_norm``) a wrapper stands while gradsan is on, which has no source. So
while the compiler runs, the functions themselves stand there. Builtin functions need no such thing: the compiler's
table of them knows their wrappers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

from gradsan import _torch
from gradsan.record.patches import Patches


def let_scripts_compile(patches: Patches) -> None:
    """Put torch's Python functions back for as long as something is being scripted."""
    for owner, name in _torch.script_compilers():
        patches.set(owner, name, _compiling(patches, getattr(owner, name)))


def _compiling(patches: Patches, compile_: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(compile_)
    def compiling(*args: Any, **kwargs: Any) -> Any:
        with patches.aside(_is_function_of_torch) as originals:

            def resolving(resolve: Callable[[str], Any]) -> Callable[[str], Any]:
                # What the program imported by name is the wrapper.
                def resolved(name: str) -> Any:
                    found = resolve(name)
                    return originals.get(id(found), found)

                return resolved

            return compile_(*(_torch.with_lookup(one, resolving) for one in args), **kwargs)

    return compiling


def _is_function_of_torch(owner: Any, original: Any) -> bool:
    return isinstance(owner, ModuleType) and isinstance(original, FunctionType) and owner.__name__.startswith("torch.")
