"""The youngest writes by storage, read off a log that grows, drops its oldest and is emptied."""

from __future__ import annotations

from typing import Any

from gradsan.record.ledger import RecentWrites
from gradsan.record.log import RawWrite


class Log:
    """What is asked of a core."""

    def __init__(self) -> None:
        self.entries: list[tuple[Any, ...]] = []
        self.write_count = 0
        self.clock = 0

    def write(self, storage: int, kind: str = "inplace", *, is_parameter: bool = False) -> None:
        self.clock += 1
        self.write_count += 1
        raw = RawWrite(self.clock, storage, 1, "add_", kind, 0, (), (), 4, None, None, 0, True, is_parameter, 0)
        self.entries.append(tuple(raw))

    def writes_after(self, clock: int) -> list[tuple[Any, ...]]:
        return [entry for entry in self.entries if entry[0] > clock]

    def clear(self) -> None:
        self.entries.clear()
        self.write_count = 0


def clocks(recent: RecentWrites) -> dict[int, list[int]]:
    return {storage: [raw.clock for raw in raws] for storage, raws in recent.by_storage().items()}


def test_each_write_is_there_once() -> None:
    log = Log()
    recent = RecentWrites(log)
    assert clocks(recent) == {}
    log.write(7)
    log.write(8)
    assert clocks(recent) == clocks(recent) == {7: [1], 8: [2]}
    log.write(7)
    assert clocks(recent) == {7: [1, 3], 8: [2]}


def test_recorded_writes_are_left_out() -> None:
    log = Log()
    log.write(0)
    log.write(7, is_parameter=True)
    log.write(7, "step")
    log.write(7, "foreach")
    assert clocks(RecentWrites(log)) == {7: [4]}


def test_of_a_storage_and_of_all_only_the_youngest_are_kept() -> None:
    log = Log()
    recent = RecentWrites(log)
    log.write(1)
    for _ in range(20):
        log.write(2)
    assert clocks(recent) == {1: [1], 2: list(range(6, 22))}
    for storage in range(100, 100 + 4_096 - 20):
        log.write(storage)
    assert len(recent.by_storage()[2]) == 16
    assert 1 not in recent.by_storage()
    for _ in range(20):
        log.write(3)
    assert 2 not in recent.by_storage()
    assert sum(map(len, recent.by_storage().values())) <= 4_096


def test_a_log_that_was_emptied_is_forgotten() -> None:
    log = Log()
    recent = RecentWrites(log)
    log.write(1)
    log.write(1)
    recent.by_storage()
    log.clear()
    log.write(2)
    assert clocks(recent) == {2: [3]}


def test_so_is_one_that_has_grown_longer_since() -> None:
    log = Log()
    recent = RecentWrites(log)
    log.write(7)
    recent.by_storage()
    log.clear()
    for _ in range(3):
        log.write(8)
    assert clocks(recent) == {8: [2, 3, 4]}
