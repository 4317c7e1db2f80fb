"""The youngest writes that may have gone unrecorded, by storage: read off the log as it grows, each write once."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from gradsan.capture.ledger import RawWrite

_KEPT, _KEPT_OF_A_STORAGE = 4_096, 16
_QUIET_KINDS = ("step", "metadata", "statistics", "collective", "outside")

# Where these stand in an entry of the log.
_STORAGE, _IS_PARAMETER, _KIND = (RawWrite._fields.index(name) for name in ("storage", "is_parameter", "kind"))


class RecentWrites:
    """Keeps them; what a log forgets that is emptied is forgotten here."""

    def __init__(self, core: Any) -> None:
        """Read the log of ``core``."""
        self._core = core
        # Several threads may call backward; a finalizer that runs meanwhile may, too.
        self._lock = threading.RLock()
        self._read_to, self._counted = -1, 0
        self._order: deque[RawWrite] = deque()
        self._found: dict[int, deque[RawWrite]] = {}

    def by_storage(self) -> Mapping[int, Sequence[RawWrite]]:
        """Up to now, of each storage the oldest first."""
        with self._lock:
            if self._core.write_count < self._counted:
                self._read_to = -1
                self._order.clear()
                self._found.clear()
            self._counted = self._core.write_count
            for entry in self._core.writes_after(self._read_to):
                self._read_to = entry[0]
                if entry[_STORAGE] and not entry[_IS_PARAMETER] and entry[_KIND] not in _QUIET_KINDS:
                    self._add(RawWrite(*entry))
            return self._found

    def _add(self, raw: RawWrite) -> None:
        self._order.append(raw)
        self._found.setdefault(raw.storage, deque(maxlen=_KEPT_OF_A_STORAGE)).append(raw)
        if len(self._order) > _KEPT:
            oldest = self._order.popleft()
            same = self._found.get(oldest.storage)
            # Of a storage that is written often it has been pushed out before.
            if same and same[0] is oldest:
                same.popleft()
            if not same:
                self._found.pop(oldest.storage, None)
