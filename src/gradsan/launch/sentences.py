"""gradsan's own sentences on stderr."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Literal, TextIO

from gradsan.model import Message
from gradsan.text import LANGUAGES, Language, choose_language, language_on, say

_LANG_SETTING = re.compile(r"(?:^|:)\s*lang=([a-z]+)")


def spoken_language(words: Sequence[str], environ: Mapping[str, str]) -> Language:
    """Return the language for sentences about ``words`` themselves, which may still prove invalid."""
    options = [after for word, after in pairwise(words) if word == "--lang"]
    options += [word.partition("=")[2] for word in words if word.startswith("--lang=")]
    setting = _LANG_SETTING.search(environ.get("GRADSAN_OPTIONS", ""))
    options += [setting.group(1)] if setting else []
    option: Literal["en", "zh", "auto"] = next((known for known in LANGUAGES if known in options[:1]), "auto")
    return choose_language(option, environ)


def complain(message: Message, language: Language) -> None:
    """Print ``message`` on stderr, on a line of its own: in English where the stream cannot encode ``language``."""
    write_to_stderr(f"gradsan: {say(message, language_on(sys.stderr, language))}\n")


def own_failure(what: str, failure: Exception) -> Message:
    """Return the sentence that gradsan itself has failed, in what ``cli.failed_<what>`` says."""
    try:
        text = (str(failure).splitlines() or [""])[0]
    except Exception:
        text = ""
    return Message(f"cli.failed_{what}", {"kind": type(failure).__name__, "text": text})


def say_options_alone() -> None:
    """Warn that ``GRADSAN_OPTIONS`` is set in a process that nobody has asked to watch."""
    complain(Message("cli.options_alone"), spoken_language((), os.environ))


def write_to_stderr(text: str) -> None:
    """Write ``text`` to stderr, as a traceback; if the program has closed that, to the original stderr.

    Characters that the stream cannot encode become escapes. Without a reader the text is lost: a
    program's last words must not fail.
    """
    for stream in _error_streams():
        try:
            _write(stream, text)
        except (ValueError, OSError, AttributeError, TypeError):
            continue
        return


def write_to_stdout(text: str) -> None:
    """Write ``text`` to the program's stdout, with escapes where needed; its reader may be gone."""
    stream = sys.stdout if sys.stdout is not None and not sys.stdout.closed else sys.__stdout__
    if stream is None or stream.closed:
        return
    encoding = getattr(stream, "encoding", None) or "utf-8"
    try:
        stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        stream.flush()
    except BrokenPipeError:
        # The interpreter flushes once more at its end; give it a file that accepts the rest.
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def flush_output() -> None:
    """Flush the program's output, so that it precedes sentences about it."""
    # A pipe without a reader: python itself reports it at its end.
    with contextlib.suppress(Exception):
        sys.stdout.flush()


def _error_streams() -> Iterator[TextIO]:
    yield from (stream for stream in (sys.stderr, sys.__stderr__) if stream is not None)


def _write(stream: TextIO, text: str) -> None:
    if stream is sys.__stderr__:
        # Unbuffered: unwritable buffered text would make the interpreter end with status 120.
        stream.flush()
        data = text.encode(stream.encoding, "backslashreplace")
        while data:
            data = data[os.write(stream.fileno(), data) :]
        return
    try:
        stream.write(text)
    except UnicodeEncodeError:
        encoding = stream.encoding or "ascii"
        stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
    stream.flush()
