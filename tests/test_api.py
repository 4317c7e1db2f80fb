"""The Python interface: ``watch`` as block and decorator, ``enable`` and ``disable``, nesting, notes, notebooks."""

from __future__ import annotations

import gc
import linecache
import os
import subprocess
import sys
import threading
from typing import Any

import pytest
import torch
from torch import nn

import gradsan
from gradsan.text import say

VERSION_ERROR = "one of the variables needed for gradient computation has been modified by an inplace operation"


def broken() -> None:
    x = torch.ones(3, requires_grad=True)
    y = x.exp()
    y += 1
    y.sum().backward()


def right() -> torch.Tensor:
    x = torch.ones(3, requires_grad=True)
    (x.exp() + 1).sum().backward()
    assert x.grad is not None
    return x.grad


def test_a_failing_backward_raises_what_pytorch_raises_with_a_note() -> None:
    with pytest.raises(RuntimeError) as plain:
        broken()
    with pytest.raises(RuntimeError) as caught, gradsan.watch(language="en") as w:
        broken()
    assert type(caught.value) is type(plain.value)
    assert str(caught.value) == str(plain.value)
    (diagnosis,) = w.diagnoses
    assert diagnosis.code == "GS101"
    (note,) = caught.value.__notes__
    assert "GS101" in note
    assert f"test_api.py:{broken.__code__.co_firstlineno + 3}" in note, "the line that wrote"
    assert w.report.program.outcome == "failed"
    assert w.report.program.exception == ("RuntimeError", str(plain.value))


def test_the_note_says_what_kept_gradsan_from_a_diagnosis(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise LookupError("the graph cannot be read")

    monkeypatch.setattr("gradsan.graph.conflicts.of_failure", fail)
    with pytest.raises(RuntimeError, match=VERSION_ERROR) as caught, gradsan.watch(language="en") as w:
        broken()
    assert w.diagnoses == ()
    (note,) = caught.value.__notes__
    assert note.splitlines()[0] == "gradsan: no explanation for this error; not seen in this run:"
    assert "LookupError: the graph cannot be read" in note
    assert "no explanation for this error" in str(w)
    with pytest.raises(ValueError) as own, gradsan.watch():
        raise ValueError("not autograd's")
    assert not hasattr(own.value, "__notes__")


def test_the_note_speaks_chinese_when_asked() -> None:
    with pytest.raises(RuntimeError) as caught, gradsan.watch(language="zh"):
        broken()
    assert "覆盖" in caught.value.__notes__[0]


def test_a_right_program_leaves_no_diagnosis() -> None:
    with gradsan.watch() as w:
        gradient = right()
    assert torch.equal(gradient, torch.ones(3).exp())
    assert w.diagnoses == ()
    assert w.report.seen.backwards == 1
    assert w.report.program.outcome == "finished"


def test_the_report_is_there_inside_the_block() -> None:
    with gradsan.watch() as w:
        with pytest.raises(RuntimeError):
            broken()
        assert [d.code for d in w.diagnoses] == ["GS101"]
        right()
    assert [d.code for d in w.diagnoses] == ["GS101"]
    assert "GS101" in str(w)


def test_other_errors_pass_untouched() -> None:
    with pytest.raises(ZeroDivisionError) as caught, gradsan.watch():
        _ = 1 / 0
    assert not hasattr(caught.value, "__notes__")


def test_as_a_decorator() -> None:
    watched = gradsan.watch()(broken)
    assert watched.__name__ == "broken"
    for _ in range(2):
        with pytest.raises(RuntimeError) as caught:
            watched()
        assert len(caught.value.__notes__) == 1


def test_nested_and_repeated_use_is_harmless() -> None:
    outer = gradsan.watch()
    for _ in range(2):
        with outer:
            with gradsan.watch() as inner:
                right()
                with pytest.raises(RuntimeError):
                    broken()
            assert len(inner.diagnoses) == 1
            right()
        assert len(outer.diagnoses) == 1, "each stretch reports its own"


def test_stretches_may_end_in_any_order() -> None:
    """Two threads, or a callback and a decorator, each end their own."""
    for mode in ("nonfinite", "heal"):
        other, wanted = gradsan.watch(), gradsan.watch(mode)
        other.__enter__()
        wanted.__enter__()
        other.__exit__(None, None, None)
        weight = torch.zeros(2, requires_grad=True)
        value = torch.exp(weight)
        value += 1
        (value.sum() if mode == "heal" else weight.log().sum()).backward()
        torch.optim.SGD([weight], lr=1.0).step()
        wanted.__exit__(None, None, None)
        assert [d.code for d in wanted.diagnoses] == ["GS101" if mode == "heal" else "GS601"]
        assert not other.diagnoses
    assert torch.equal(weight, torch.full((2,), -1.0)), "healed"


def test_enable_and_disable() -> None:
    methods = dict(vars(torch.Tensor))
    assert gradsan.disable() is None, "nothing was enabled"
    gradsan.enable()
    gradsan.enable()
    with pytest.raises(RuntimeError):
        broken()
    assert [d.code for d in gradsan.disable().diagnoses] == ["GS101"]  # type: ignore[union-attr]
    assert vars(torch.Tensor)["add_"] is not methods.get("add_"), "still on"
    gradsan.disable()
    assert dict(vars(torch.Tensor)) == methods


def test_an_enabled_stretch_puts_one_note_whatever_lies_in_it() -> None:
    gradsan.enable()
    try:
        with pytest.raises(RuntimeError) as caught, gradsan.watch():
            broken()
        loss = torch.ones(3, requires_grad=True).sin().sum()
        loss.backward()
        with pytest.raises(RuntimeError) as again:
            loss.backward()
        with pytest.raises(ZeroDivisionError) as other:
            _ = 1 / 0
    finally:
        report = gradsan.disable()
    assert [len(one.value.__notes__) for one in (caught, again)] == [1, 1]
    assert "GS404" in again.value.__notes__[0]
    assert not hasattr(other.value, "__notes__")
    assert report is not None
    assert [one.code for one in report.diagnoses] == ["GS101"], "what the program caught is its own business"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_watched_block_says_that_children_were_forked_in_it() -> None:
    with gradsan.watch() as w:
        for _ in range(2):
            child = os.fork()
            if child == 0:
                os._exit(0)
            os.waitpid(child, 0)
    [spot] = w.report.seen.blind_spots
    assert say(spot, "en").startswith("2 child processes were forked")
    with gradsan.watch() as w:
        right()
    assert w.report.seen.blind_spots == ()


def test_report_before_the_block_says_so() -> None:
    with pytest.raises(RuntimeError, match="not been entered"):
        _ = gradsan.watch().report


def test_a_graph_made_before_watching_is_explained_as_far_as_known() -> None:
    x = torch.ones(3, requires_grad=True)
    y = x.exp()
    with pytest.raises(RuntimeError), gradsan.watch() as w:  # noqa: PT012
        y += 1
        y.sum().backward()
    (diagnosis,) = w.diagnoses
    assert [label.role for label in diagnosis.labels] == ["written", "used"]
    assert diagnosis.tensor is not None
    assert diagnosis.tensor.op == "ExpBackward0"


def test_a_write_before_watching_is_not_invented() -> None:
    x = torch.ones(3, requires_grad=True)
    y = x.exp()
    y += 1
    with pytest.raises(RuntimeError), gradsan.watch() as w:
        y.sum().backward()
    (diagnosis,) = w.diagnoses
    assert diagnosis.code == "GS121"
    assert not [label for label in diagnosis.labels if label.role == "written"]


def overwritten_by(write: Any) -> tuple[int, tuple[Any, ...]]:
    """The address of the storage that ``write`` has changed before backward, and what gradsan says."""
    with gradsan.watch() as w:
        x = torch.ones(3, requires_grad=True)
        y = x.exp()
        write(y)
        with pytest.raises(RuntimeError):
            y.sum().backward()
    return y.untyped_storage()._cdata, w.diagnoses


def test_a_write_to_memory_that_was_given_back_is_not_the_writer() -> None:
    """As in a notebook: a cell fails, and the next one gets its memory, which is written by a name taken before."""
    relu_ = torch.relu_
    earlier, used_again = set(), 0
    for number in range(50):
        # The allocator may give the two calls of a round one of two places each: every other round swaps them.
        taken = torch.empty(3) if number % 2 else None
        earlier.add(overwritten_by(lambda y: y.add_(1))[0])
        del taken
        # The error that was caught refers to its frames, and they to it.
        gc.collect()
        address, (diagnosis,) = overwritten_by(relu_)
        assert diagnosis.code == "GS121"
        assert diagnosis.labels[0].role == "saved"
        used_again += address in earlier
    assert used_again


def test_every_optimizer_that_wrote_is_named_whatever_the_depth_of_the_first_network() -> None:
    deep = nn.Sequential(*(layer for _ in range(12) for layer in (nn.Linear(4, 4), nn.Tanh())))
    wide = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    first, second = (torch.optim.SGD(net.parameters(), lr=0.1) for net in (deep, wide))
    with gradsan.watch() as watched:
        out = deep(wide(torch.ones(5, 4)))
        out.sum().backward(retain_graph=True)
        first.step()
        second.step()
        with pytest.raises(RuntimeError, match=VERSION_ERROR):
            out.square().sum().backward()
    (found,) = watched.diagnoses
    lines = [linecache.getline(one.frame.file, one.frame.line).strip() for one in found.labels if one.role == "written"]
    assert lines == ["first.step()", "second.step()"]


def test_threads() -> None:
    caught: list[str] = []

    def work() -> None:
        try:
            broken()
        except RuntimeError as error:
            caught.append(str(error))

    with gradsan.watch() as w:
        workers = [threading.Thread(target=work) for _ in range(4)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    assert len(caught) == 4
    assert all(message.startswith(VERSION_ERROR) for message in caught)
    (diagnosis,) = w.diagnoses
    assert diagnosis.count == 4, "the same finding is told once"


def test_in_a_notebook_cell() -> None:
    source = (
        "import torch, gradsan\n"
        "with gradsan.watch() as w:\n"
        "    h = torch.ones(3, requires_grad=True).sigmoid()\n"
        "    h.mul_(2)\n"
        "    try:\n"
        "        h.sum().backward()\n"
        "    except RuntimeError:\n"
        "        pass\n"
    )
    file = "<ipython-input-1-0123456789ab>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    space: dict[str, Any] = {}
    exec(compile(source, file, "exec"), space)
    (diagnosis,) = space["w"].diagnoses
    assert diagnosis.tensor.name == "h"
    assert [(label.role, label.frame.line) for label in diagnosis.labels] == [("saved", 3), ("written", 4), ("used", 6)]
    assert "h.mul_(2)" in str(space["w"])
    assert space["w"]._repr_mimebundle_()["text/plain"] == str(space["w"])


def test_importing_gradsan_imports_no_torch() -> None:
    code = "import sys, gradsan; gradsan.watch(); print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_the_public_names() -> None:
    assert sorted(gradsan.__all__) == gradsan.__all__
    assert all(hasattr(gradsan, name) for name in gradsan.__all__)


def test_watching_leaves_nothing_in_the_way_of_imports():
    before = list(sys.meta_path)
    for _ in range(3):
        with gradsan.watch():
            pass
    assert sys.meta_path == before
