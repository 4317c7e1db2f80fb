"""Writes behind ``.data`` that leave every byte as it was are notes; others are what they were before."""

from __future__ import annotations

import collections
import functools
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch

import gradsan
from cases import each
from gradsan import _torch
from gradsan.detect import snapshots
from gradsan.record.recorder import recorder


def begin_anew() -> None:
    """Forget what was logged: lines are known by their stacks, which equal each other in all cases of a test."""
    recorder().core.clear()


rounds_begin_anew = pytest.fixture(autouse=True)(begin_anew)
each_anew = functools.partial(each, before=begin_anew)


def told(watched: Any) -> list[tuple[str, str]]:
    return [(one.code, one.severity) for one in watched.diagnoses]


def scaled_by_one(t: torch.Tensor) -> None:
    t.data.mul_(1)


def added_nothing(t: torch.Tensor) -> None:
    t.data += 0


def copied_from_itself(t: torch.Tensor) -> None:
    t.data.copy_(t.detach())


def clamped_nothing(t: torch.Tensor) -> None:
    t.data.clamp_(-100, 100)


def assigned_by_an_empty_mask(t: torch.Tensor) -> None:
    t.data[t.data > 100] = 0.0


def out_of_the_same(t: torch.Tensor) -> None:
    torch.mul(t.detach(), 1, out=t.data)


def through_a_kept_alias(t: torch.Tensor) -> None:
    alias = t.data
    alias.mul_(1)
    alias.clamp_(-100, 100)


def there_and_back(t: torch.Tensor) -> None:
    alias = t.data
    before = alias.clone()
    alias.zero_()
    alias.copy_(before)


def foreach_by_one(t: torch.Tensor) -> None:
    torch._foreach_mul_([t.data], 1.0)


SAME = [
    scaled_by_one,
    added_nothing,
    copied_from_itself,
    clamped_nothing,
    assigned_by_an_empty_mask,
    out_of_the_same,
    through_a_kept_alias,
    there_and_back,
    foreach_by_one,
]


def doubled(t: torch.Tensor) -> None:
    t.data.mul_(2)


def clamped(t: torch.Tensor) -> None:
    t.data.clamp_(-100, 1.2)


def one_element(t: torch.Tensor) -> None:
    t.data[..., 1:2] = 7.0


def first_not_then_so(t: torch.Tensor) -> None:
    t.data.mul_(1)
    t.data.mul_(2)
    t.data.mul_(1)


def sign_of_zero(t: torch.Tensor) -> None:
    t.data[0] *= -1


OTHER = [doubled, clamped, one_element, first_not_then_so, sign_of_zero]


def input_saved() -> tuple[torch.Tensor, torch.Tensor]:
    t = torch.tensor([1.0, 1.5, 2.0], requires_grad=True) * 1
    return t, t.pow(2).sum()


def output_saved() -> tuple[torch.Tensor, torch.Tensor]:
    t = torch.tensor([1.0, 1.5, 2.0], requires_grad=True).exp()
    return t, t.sum()


def leaf_saved() -> tuple[torch.Tensor, torch.Tensor]:
    t = torch.tensor([1.0, 1.5, 2.0], requires_grad=True)
    return t, t.pow(2).sum()


def part_saved() -> tuple[torch.Tensor, torch.Tensor]:
    t = torch.tensor([[1.0, 1.5, 2.0], [3.0, 4.0, 5.0]], requires_grad=True) * 1
    return t, t.t()[:, :1].pow(2).sum()


def buffer_saved() -> tuple[torch.Tensor, torch.Tensor]:
    t = torch.tensor([1.0, 1.5, 2.0])
    return t, (torch.ones(3, requires_grad=True) * t).sum()


every_save = pytest.mark.parametrize("saved", [input_saved, output_saved, leaf_saved, part_saved, buffer_saved])
Saved = Callable[[], tuple[torch.Tensor, torch.Tensor]]


@every_save
@each_anew("write", SAME)
def test_the_same_bytes_are_a_note(write: Any, saved: Saved) -> None:
    with gradsan.watch() as watched:
        t, loss = saved()
        write(t)
        loss.backward()
    assert told(watched) == [("GS202", "note")]
    (one,) = watched.diagnoses
    assert one.gradient.status == "right"


@every_save
@each_anew("write", OTHER)
def test_other_bytes_are_an_error(write: Any, saved: Saved) -> None:
    with gradsan.watch() as watched:
        t, loss = saved()
        write(t)
        loss.backward()
    assert told(watched) == [("GS202", "error")]


@each_anew("write", SAME)
def test_an_alias_from_before_the_save(write: Any) -> None:
    with gradsan.watch() as watched:
        t = torch.tensor([1.0, 1.5, 2.0], requires_grad=True) * 1
        alias = t.data
        loss = t.pow(2).sum()
        alias.mul_(1)
        loss.backward()
    assert told(watched) == [("GS202", "note")]


def test_a_copy_from_before_a_change_proves_nothing_for_a_later_save() -> None:
    with gradsan.watch() as watched:
        t = torch.tensor([1.0, 1.5, 2.0], requires_grad=True) * 1
        alias = t.data
        before = alias.clone()
        alias.mul_(2)  # what is saved is twice as much
        loss = t.pow(2).sum()
        alias.copy_(before)
        loss.backward()
    assert told(watched)[0] == ("GS202", "error")


def test_nor_one_from_before_a_counted_change() -> None:
    with gradsan.watch() as watched:
        w = torch.tensor([1.0, 1.5, 2.0], requires_grad=True)
        optimizer = torch.optim.SGD([w], lr=0.1)
        alias = w.data
        before = alias.clone()
        w.grad = torch.ones(3)
        optimizer.step()
        loss = w.pow(2).sum()
        alias.copy_(before)
        loss.backward()
    assert told(watched)[0] == ("GS202", "error")


def test_large_memory_is_not_copied() -> None:
    with gradsan.watch() as watched:
        t = torch.ones(snapshots.BYTES_OF_A_COPY // 4 + 1, requires_grad=True) * 1
        loss = t.pow(2).sum()
        t.data.mul_(1)
        loss.backward()
    assert told(watched) == [("GS202", "error")]


def test_a_note_and_an_error_of_one_place_are_two_findings() -> None:
    with gradsan.watch() as watched:
        for factor in (1, 2, 1):
            t, loss = input_saved()
            t.data.mul_(factor)
            loss.backward()
    assert sorted((*kind, one.count) for kind, one in zip(told(watched), watched.diagnoses, strict=True)) == [
        ("GS202", "error", 1),
        ("GS202", "note", 2),
    ]


@each_anew("write", SAME)
def test_a_value_that_was_not_changed_before_it_was_used(write: Any) -> None:
    with gradsan.watch() as watched:
        h = torch.tensor([1.0, 1.5, 2.0], requires_grad=True) * 2
        write(h)
        h.pow(2).sum().backward()
    assert told(watched) == []


@each_anew("write", OTHER)
def test_a_value_that_was_changed_before_it_was_used(write: Any) -> None:
    with gradsan.watch() as watched:
        h = torch.tensor([1.0, 1.5, 2.0], requires_grad=True) * 1
        write(h)
        h.pow(2).sum().backward()
    assert told(watched) == [("GS215", "warning")]


def test_undone_where_autograd_knows_of_the_change_is_a_change() -> None:
    with gradsan.watch() as watched:
        h = torch.tensor([1.0, 1.5, 2.0], requires_grad=True) * 1
        alias = h.data
        h.mul_(2)  # recorded
        alias.mul_(0.5)  # not recorded
        h.pow(2).sum().backward()
    assert told(watched) == [("GS215", "warning")]


def test_nothing_is_copied_where_nothing_is_saved() -> None:
    uncounted = recorder().watching.uncounted
    with gradsan.watch():
        w = torch.ones(100, requires_grad=True)
        w.data.normal_()
        assert uncounted.snapshots._copies == {}
        w.pow(2).sum().backward()
        w.data -= 0.1 * w.grad.data
        assert uncounted.snapshots._copies == {}
        loss = w.pow(2).sum()
        w.data.mul_(1)
        assert len(uncounted.snapshots._copies) == 1
        loss.backward()


def scaled(view: torch.Tensor) -> None:
    view.mul_(1.0)


def filled(view: torch.Tensor) -> None:
    view.copy_(torch.ones(2))


def filled_by_out(view: torch.Tensor) -> None:
    torch.exp(torch.ones(2), out=view)


def scaled_as_a_view(view: torch.Tensor) -> None:
    view.view(2, 1).mul_(2)


def read(view: torch.Tensor) -> None:
    view.sum().item()


@pytest.mark.parametrize("mode", ["watch", "deep", "heal"])
@each_anew("use", [scaled, filled, filled_by_out, scaled_as_a_view, read])
def test_a_view_that_pytorch_refuses_to_write_stays_refused(use: Callable[[torch.Tensor], None], mode: str) -> None:
    with gradsan.watch(mode):
        weight = torch.ones(2, requires_grad=True)
        for _ in range(3):  # the detectors of meaning look at whole rounds
            buffer = torch.zeros(4)
            left, right = buffer[:2], buffer[2:]
            left[:] = weight * 2
            for _ in range(2):
                with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
                    right.add_(weight)
                with torch.no_grad():
                    use(right)
            (weight * 2).sum().backward()


def test_copies_are_let_go_with_their_storage() -> None:
    uncounted = recorder().watching.uncounted
    with gradsan.watch():
        for _ in range(3):
            t = torch.ones(100, requires_grad=True) * 1
            assert t.data.sum() == 100
        del t
        gc.collect()
        uncounted.snapshots.forget_dead()
        assert uncounted.snapshots._copies == {}
        assert uncounted.snapshots._bytes == 0


def test_no_more_is_kept_than_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "SNAPSHOT_BYTES", 1_000)
    with gradsan.watch() as watched:
        held = [torch.ones(100, requires_grad=True) * 1 for _ in range(4)]
        losses = [t.pow(2).sum() for t in held]
        for t in held:
            t.data.mul_(1)
        sum(losses).backward()
    assert recorder().watching.uncounted.snapshots._bytes <= 1_000
    assert {severity for _, severity in told(watched)} == {"note", "error"}


def test_the_program_is_as_it_was_without() -> None:
    def run() -> torch.Tensor:
        w = torch.tensor([1.0, 1.5, 2.0], requires_grad=True)
        for _ in range(4):
            w.pow(2).sum().backward()
            w.data -= 0.1 * w.grad
            w.grad = None
        return w.detach()

    alone = run()
    with gradsan.watch() as watched:
        beside = run()
    assert torch.equal(alone, beside)
    assert watched.diagnoses == ()


def test_a_view_that_has_no_graph_any_more_is_not_asked_for_one() -> None:
    weight = torch.randn(3, 2, requires_grad=True)
    with gradsan.watch("deep") as watched, torch.no_grad():
        weight.mul_(2)
        for row in (weight.view(6)[:2], weight[:, 1]):
            row.mul_(0.5)
            row.clamp_(-1, 1)
    assert not watched.report.seen.blind_spots


def test_dead_snapshots_are_searched_at_a_bounded_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a data set of many arrays each new one, and each backward, looks at a few others, and finds the dead."""
    calls = collections.Counter[str]()
    for name in ("expired", "__del__"):
        original = getattr(_torch.weak_storage, name)

        def counted(weak: Any, name: str = name, original: Any = original) -> Any:
            calls[name] += 1
            return original(weak)

        monkeypatch.setattr(_torch.weak_storage, name, counted)
    weight = torch.ones(4, requires_grad=True)
    with gradsan.watch():
        held = [torch.from_numpy(torch.ones(4).numpy()) for _ in range(500)]
        behind = [torch.ones(4) for _ in range(500)]
        for one in behind:
            one.data.mul_(1)
        calls.clear()
        for array in held[:100]:
            (weight * array).sum().backward()
            held.append(torch.from_numpy(torch.ones(4).numpy()))
        assert calls["expired"] < 100 * 150  # 300 looks at 1,000 entries or more before
        del held, behind, one, array
        gc.collect()
        calls.clear()
        for _ in range(200):
            (weight * 2).sum().backward()
        assert calls["__del__"] > 1_000
