"""A file that receives the report: checked before the program runs, written in one move when it has ended."""

from __future__ import annotations

import errno
import os
import secrets
import stat
from pathlib import Path

from gradsan.model import Message
from gradsan.options import OptionsError


class ReportFile:
    """A file to be written later, wherever the program may have gone by then."""

    def __init__(self, path: str, directory: Path | None) -> None:
        """Look at ``path`` (relative to ``directory``, where the program starts) and make sure that it can be written.

        Raises:
            OptionsError: where it cannot.
        """
        self.shown = path
        try:
            self._path = (directory or Path()) / path
            if not self.is_special:
                # A link stays a link: its target is replaced.
                self._path = self._path.resolve()
            self._check()
        except (OSError, RuntimeError, ValueError) as failure:
            raise OptionsError(self._cannot(failure)) from None

    def write(self, content: str | bytes) -> Message | None:
        """Write ``content`` (text as UTF-8); the sentence that says why it could not be written, or None.

        Readers see the former file or the whole new one, never a part. What is no regular file (a pipe,
        ``/dev/stdout``) is written as it is.
        """
        data = content if isinstance(content, bytes) else content.encode("utf-8", "backslashreplace")
        try:
            if self.is_special:
                self._path.write_bytes(data)
            else:
                self._replace(data)
        except OSError as failure:
            return self._cannot(failure)
        return None

    def _check(self) -> None:
        if self._path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if self._path.exists() and not os.access(self._path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        if not self.is_special:
            # Only making a file tells for sure that one can be made (read-only file systems, quotas, no such folder).
            self._create().unlink()

    @property
    def is_special(self) -> bool:
        """Whether it is no regular file: a pipe, ``/dev/stdout``."""
        try:
            return not stat.S_ISREG(self._path.stat().st_mode)
        except FileNotFoundError:
            return False

    def _create(self) -> Path:
        path = self._path.with_name(f".{self._path.name[:100]}.{secrets.token_hex(8)}.tmp")
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
        return path

    def _replace(self, data: bytes) -> None:
        path = self._create()
        try:
            path.write_bytes(data)
            if self._path.exists():
                path.chmod(stat.S_IMODE(self._path.stat().st_mode))
            path.replace(self._path)
        except BaseException:
            path.unlink(missing_ok=True)
            raise

    def _cannot(self, failure: Exception) -> Message:
        reason = (isinstance(failure, OSError) and failure.strerror) or str(failure)
        return Message("cli.unwritable_json", {"path": self.shown, "reason": reason})
