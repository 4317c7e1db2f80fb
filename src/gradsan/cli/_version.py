"""``gradsan --version --verbose``: what gradsan runs on, and whether it can watch there."""

from __future__ import annotations

import argparse
import platform

from gradsan import __version__
from gradsan._session import Session
from gradsan.cli._parser import help_language
from gradsan.launch.sentences import write_to_stdout
from gradsan.model import Message
from gradsan.text import say


def show(_: argparse.Namespace) -> int:
    """Print it. The exit status is 1 where something cannot be watched."""
    language = help_language()
    lines = [f"gradsan {__version__}", f"Python {platform.python_version()}"]
    problems: tuple[Message, ...] = ()
    try:
        import torch
    except ImportError as failure:
        lines.append(say(Message("cli.verbose_none", {"error": str(failure)}), language))
    else:
        lines.append(f"torch {torch.__version__}")
        session = Session()
        session.start()
        session.stop()
        problems = session.problems
        if session.core is not None:
            lines.append(say(Message("cli.verbose_core", {"kind": session.core}), language))
        shown = [Message("cli.verbose_problem", {"problem": say(one, language)}) for one in problems]
        lines += [say(one, language) for one in shown or [Message("cli.verbose_fine")]]
    write_to_stdout("\n".join(lines) + "\n")
    return 1 if problems else 0
