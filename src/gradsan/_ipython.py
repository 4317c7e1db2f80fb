"""IPython and notebook extension: ``%load_ext gradsan``, ``%%gradsan``, errors explained below their traceback."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from importlib import import_module
from typing import Any, get_args

from gradsan._session import Session
from gradsan._terms import Mode
from gradsan.model import Message, Program

_undo_by_shell: dict[int, Callable[[], None]] = {}
_watched_cells: set[int] = set()


def load(shell: Any) -> None:
    """Explain errors in ``shell`` and register the magic ``%%gradsan``, on ``%load_ext gradsan``."""
    if id(shell) in _undo_by_shell:
        return
    _undo_by_shell[id(shell)] = install_in(shell)

    def gradsan(line: str, cell: str) -> None:
        """Run the cell under gradsan and show the report; the line may name a mode: watch (the default), deep, heal."""
        run_watched(shell, line, cell)

    shell.register_magic_function(gradsan, magic_kind="cell", magic_name="gradsan")


def unload(shell: Any) -> None:
    """Undo :func:`load`, on ``%unload_ext gradsan``."""
    undo = _undo_by_shell.pop(id(shell), None)
    if undo is not None:
        undo()
        shell.magics_manager.magics["cell"].pop("gradsan", None)


def install_in(shell: Any) -> Callable[[], None]:
    """Make ``shell`` explain errors of autograd below their traceback; return a function that undoes it.

    An existing custom handler of the shell keeps its exceptions.
    """
    kinds, handler = shell.custom_exceptions, shell.CustomTB
    is_on = True

    def explain(shell: Any, kind: Any, error: Any, trace: Any, tb_offset: Any = None) -> Any:
        if kinds and isinstance(error, kinds):
            return handler(kind, error, trace, tb_offset=tb_offset)
        shell.showtraceback((kind, error, trace), tb_offset=tb_offset)
        if is_on and id(shell) not in _watched_cells:
            _show_explained(error if error.__traceback__ is not None else error.with_traceback(trace))
        return None

    shell.set_custom_exc((*kinds, Exception), explain)
    installed = shell.CustomTB

    def undo() -> None:
        nonlocal is_on
        is_on = False
        if shell.CustomTB is installed or getattr(shell.CustomTB, "__func__", None) is getattr(
            installed, "__func__", installed
        ):
            shell.custom_exceptions, shell.CustomTB = kinds, handler

    return undo


def run_watched(shell: Any, line: str, cell: str) -> None:
    """Run ``cell`` in ``shell`` under gradsan and show the report; ``line`` is the mode, empty for watch."""
    mode = line.strip() or "watch"
    if mode not in get_args(Mode):
        _complain(mode)
        return
    session = Session(mode)  # type: ignore[arg-type]
    session.start()
    _watched_cells.add(id(shell))
    error = None
    try:
        error = shell.run_cell(cell, store_history=False).error_in_exec
        if error is not None:
            session.examine(error)
    finally:
        _watched_cells.discard(id(shell))
        session.stop()
    from gradsan._autopsy import Explanation

    _display(Explanation(session.report(Program.ended_by(error))))


def _show_explained(error: BaseException) -> None:
    try:
        from gradsan._autopsy import explain_exception

        explained = explain_exception(error)
        if explained.diagnoses:
            _display(explained)
    except Exception:
        if os.environ.get("GRADSAN_DEBUG"):
            traceback.print_exc()


def _complain(mode: str) -> None:
    from gradsan.launch.sentences import complain
    from gradsan.text import choose_language

    said = {"name": mode, "known": ", ".join(get_args(Mode))}
    complain(Message("cli.unknown_mode", said), choose_language("auto", os.environ))


def _display(shown: Any) -> None:
    # Imported late: only IPython itself calls this, and it is no dependency.
    import_module("IPython.display").display(shown)
