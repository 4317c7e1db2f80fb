"""``install()``: explanation of uncaught errors of autograd, after their traceback.

Nothing is watched and torch is not imported: until such an error occurs there is only a function in
``sys.excepthook`` and ``threading.excepthook``, or IPython's custom handler.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gradsan.model import Report
    from gradsan.options import Options

_undo: list[Callable[[], None]] = []


def install() -> None:
    """Explain from now on every error of autograd that ends the program or a thread; a second call does nothing.

    The traceback is shown first, as without gradsan, then the report on stderr. In IPython and notebooks
    the report follows the traceback in the cell's output.
    """
    if _undo:
        return
    from gradsan.launch.uncaught import in_excepthook

    shell = _shell()
    if shell is None:
        _undo.append(in_excepthook(sys, show_explained, is_before=False))
    else:
        from gradsan._ipython import install_in

        _undo.append(install_in(shell))
    _undo.append(in_excepthook(threading, show_explained, is_before=False))


def uninstall() -> None:
    """Undo :func:`install`; does nothing if it was not called. Hooks that others have set since are kept."""
    while _undo:
        _undo.pop()()


def show_explained(error: BaseException) -> None:
    """Write the report of ``error`` to stderr if gradsan knows the error. Never raises."""
    if not isinstance(error, Exception):
        return
    try:
        from gradsan._autopsy import explain_exception

        report = explain_exception(error).report
        if report.diagnoses:
            _write(report)
    except Exception:
        if os.environ.get("GRADSAN_DEBUG"):
            traceback.print_exc()


def _write(report: Report) -> None:
    from gradsan.launch.reporting import wants_color, width_of
    from gradsan.launch.sentences import flush_output, write_to_stderr
    from gradsan.present import needs_ascii, render_terminal
    from gradsan.text import choose_language, language_on

    options = _options()
    text = render_terminal(
        report,
        language=language_on(sys.stderr, choose_language(options.lang, os.environ)),
        color=wants_color(options.color, sys.stderr, os.environ),
        width=width_of(sys.stderr),
        stacks=options.stacks,
        ascii=needs_ascii(getattr(sys.stderr, "encoding", None)),
    )
    flush_output()
    write_to_stderr(text)


def _options() -> Options:
    """Return the options of the environment and pyproject.toml; the defaults if they are invalid."""
    from gradsan.options import Options, OptionsError, read_options, working_directory

    try:
        return read_options({}, os.environ, working_directory())
    except OptionsError:
        return Options()


def _shell() -> Any:
    """Return the IPython shell of this process, or None."""
    ipython = sys.modules.get("IPython")
    with contextlib.suppress(AttributeError):
        return None if ipython is None else ipython.get_ipython()
    return None
