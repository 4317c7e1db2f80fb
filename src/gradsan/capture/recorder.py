"""Switches capture on and off, and keeps what it found. One recorder a process, because torch's hooks are."""

from __future__ import annotations

import os
import threading
from typing import Any

from gradsan.capture import _core, _torch, conflicts, messages, saves, writes
from gradsan.capture.patches import Patches
from gradsan.capture.steps import Steps
from gradsan.model import Conflict, Evidence, Message, Seen

_CONFLICTS_KEPT = 1_000


class Recorder:
    """Clock, logs and conflicts of this process."""

    def __init__(self, native: bool | None = None) -> None:
        """Prepare, without touching torch yet. ``native`` as in :func:`gradsan.capture._core.make_core`."""
        self.core = _core.make_core(native)
        self.core.on_stale = self._on_stale
        self.steps = Steps(self.core)
        self.conflicts: list[Conflict] = []
        self.blind_spots: dict[str, Message] = {}
        self._patches = Patches()
        self._depth = 0
        self._lock = threading.Lock()

    @property
    def is_on(self) -> bool:
        """Whether capture is running."""
        return self._depth > 0

    def start(self) -> None:
        """Begin to record; nested starts only count."""
        with self._lock:
            self._depth += 1
            if self._depth > 1:
                return
            self.core.active = True
            try:
                saves.install(self.core, self._patches, self._on_hooked_stale)
                writes.install(self.core, self._patches)
                self.steps.install(self._patches)
            except BaseException:
                self.core.active = False
                self._depth = 0
                self._patches.undo()
                raise

    def stop(self) -> None:
        """End one start; the last one takes every hook and patch out again."""
        with self._lock:
            if self._depth == 0:
                return
            self._depth -= 1
            if self._depth:
                return
            self.core.active = False
            self._patches.undo()

    def mark(self) -> tuple[int, int, int, int, int]:
        """A point in the run; :meth:`evidence` tells what came after it."""
        core = self.core
        return len(self.conflicts), core.saves, core.write_count, core.backwards, core.steps

    def evidence(self, since: tuple[int, int, int, int, int] = (0, 0, 0, 0, 0)) -> Evidence:
        """What was found since a mark, as plain data."""
        core = self.core
        first, saved, written, backwards, steps = since
        return Evidence(
            conflicts=tuple(self.conflicts[first:]),
            seen=Seen(
                saves=core.saves - saved,
                writes=core.write_count - written,
                backwards=core.backwards - backwards,
                steps=core.steps - steps,
                blind_spots=tuple(self.blind_spots.values()),
            ),
        )

    def note_blind_spot(self, message: Message) -> None:
        """Remember, once, something this run did that gradsan could not see."""
        self.blind_spots.setdefault(message.key, message)

    def _on_stale(self, save: Any) -> Any:
        tensor = save.tensor
        if tensor._version == save.version:
            return tensor
        node = _torch.current_node()
        message = messages.stale_message(
            tensor, save.version, messages.producer_clause(node, conflicts.slot_of(node, save))
        )
        self._keep(save, tensor, save, raised=True)
        # Given back, not raised: raising here would put a frame of gradsan's into the program's traceback.
        return RuntimeError(message)

    def _on_hooked_stale(self, save: Any, alias: Any) -> None:
        self._keep(save, alias, save, raised=False)

    def _keep(self, save: Any, tensor: Any, packed: Any, *, raised: bool) -> None:
        if len(self.conflicts) >= _CONFLICTS_KEPT:
            return
        try:
            self.conflicts.append(conflicts.collect(self.core, self.steps, save, tensor, packed, raised=raised))
        except Exception as failure:
            if os.environ.get("GRADSAN_DEBUG"):
                raise
            self.note_blind_spot(Message("blind.collect_failed", {"error": f"{type(failure).__name__}: {failure}"}))


_recorder: Recorder | None = None


def recorder(native: bool | None = None) -> Recorder:
    """The recorder of this process, made on first use; ``native`` chooses its core while it is off."""
    global _recorder
    if _recorder is None or (native is not None and not _recorder.is_on and _recorder.core.is_native != native):
        _recorder = Recorder(native)
    return _recorder
