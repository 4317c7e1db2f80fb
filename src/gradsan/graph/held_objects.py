"""Objects of the program's own classes: those that only a library holds, and their methods that use an attribute."""

from __future__ import annotations

import itertools
import operator
import re
import sys
from collections.abc import Iterator
from types import FunctionType

from torch import nn

from gradsan import _torch
from gradsan._collector import kinds_below, objects_of
from gradsan._imports import stored_in
from gradsan.graph.variables import Found, Scope, Space
from gradsan.model import Clue, Site
from gradsan.record.raw_stacks import RawStack
from gradsan.record.stacks import definition_site, is_user_file


def spaces_of_objects() -> list[Space]:
    """Return the live objects of the program's classes as variables, each under the name of its class.

    The classes are those at the top of the program's modules, and all modules of PyTorch that the program defines.
    """
    kinds = {one for one in (*_classes_at_top(), *kinds_below(nn.Module)) if _is_of_program(one)}
    return [Space(Scope("", type(one).__name__), {type(one).__name__: one}, frozenset()) for one in objects_of(kinds)]


def _classes_at_top() -> Iterator[type]:
    for module in list(sys.modules.values()):
        stored = stored_in(module)
        if is_user_file(stored.get("__file__") or "<frozen"):
            # Not ``isinstance``: ``__class__`` of a proxy may run code.
            yield from (one for one in list(stored.values()) if issubclass(type(one), type))


def _is_of_program(kind: type) -> bool:
    return is_user_file(stored_in(sys.modules.get(str(kind.__module__))).get("__file__") or "<frozen")


def is_run_by_library(stack: RawStack) -> bool:
    """Whether a package other than torch runs the code that called torch: a trainer, an engine, an event handler."""
    in_torch = operator.methodcaller("startswith", _torch.package_folder())
    files = itertools.dropwhile(in_torch, (code.co_filename for code in stack.codes))
    of_user = [is_user_file(file) for file in files]
    return not all(itertools.dropwhile(operator.not_, reversed(of_user)))


def holder_clue(path: str, found: Found) -> tuple[Clue, ...]:
    """Return the clue ``holder`` for ``path``, where ``found`` lies; none where no class of the program has it.

    Its site are the methods of the innermost object's class that name the attribute; its ``name`` is ``path`` as such
    a method spells it (``self.total``).
    """
    for prefix, holder in reversed(found.around):
        rest = path[len(prefix) :] if path.startswith(prefix) else ""
        attribute = re.match(r"\.(\w+)", rest)
        if attribute is None:
            continue
        members = (one for kind in type(holder).__mro__ for one in list(vars(kind).values()))
        codes = (one.__code__ for one in members if isinstance(one, FunctionType))
        named = (code for code in codes if attribute[1] in code.co_names and code.co_argcount)
        own = [code for code in named if is_user_file(code.co_filename)]
        if own:
            frames = tuple(frame for code in own for frame in definition_site(code).frames)
            return (Clue("holder", Site(frames), name=f"{own[0].co_varnames[0]}{rest}"),)
    return ()
