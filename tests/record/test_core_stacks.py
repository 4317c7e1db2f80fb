"""Raw stacks of both cores."""

import ctypes
import dataclasses
import functools
import gc
import inspect
import itertools
import sys
import threading
import weakref
from pathlib import Path
from types import CodeType

import pytest
import torch
import torch.utils.checkpoint

from core_kit import constants, places, plain
from gradsan.record import stacks


def test_one_place_is_one_stack(core):
    def here():
        return core.stack()

    seen = {id(here()) for _ in range(50)}
    for _ in range(50):
        seen.add(id(here()))
    assert len(seen) <= 4  # two places; before 3.12 a call site moves by one instruction once it is specialised
    assert here() is not None


def test_the_stack_is_that_of_the_frames(core):
    def recurse(depth):
        if depth:
            return recurse(depth - 1)
        frame, codes, lastis = sys._getframe(), [], []
        while frame is not None and len(codes) < constants(core).DEPTH_KEPT:
            codes.append(frame.f_code)
            lastis.append(frame.f_lasti)
            frame = frame.f_back
        return core.stack(), codes, lastis

    for depth in (0, 1, 9, 40, 200):
        stack, codes, lastis = recurse(depth)
        assert stack.codes == tuple(codes)
        assert stack.lastis[1:] == tuple(lastis[1:])
        assert stack.codes[0] is recurse.__code__
    assert len(stack.codes) == constants(core).DEPTH_KEPT


def test_skip_goes_outwards(core):
    def inner():
        return [core.stack(0), core.stack(skip=1), core.stack(2), core.stack(10_000)]

    whole, one, two, beyond = inner()
    assert whole.codes[0] is inner.__code__
    assert one.codes == whole.codes[1:]
    assert one.lastis == whole.lastis[1:]
    assert two.codes == whole.codes[2:]
    assert beyond.codes == beyond.lastis == ()


def program(cores, how):
    """One stack of each core per place: recursion, generators, classes, C callbacks, generated code."""
    found = []

    def take():
        stacks = []
        for core in cores:
            stacks.append(how(core))
        found.append(stacks)

    def generator():
        take()
        received = yield
        take()
        yield received
        yield from inner()

    def inner():
        take()
        yield 1

    def recurse(depth):
        return recurse(depth - 1) if depth else take()

    class Holder:
        def __init__(self):
            take()

        def __lt__(self, other):
            take()
            return True

        prop = property(lambda self: take())

    running = generator()
    next(running)
    running.send(1)
    list(running)
    [take() for _ in range(3)]
    recurse(5)
    recurse(150)
    sorted([Holder(), Holder()])
    _ = Holder().prop
    (lambda: take())()
    functools.partial(take)()
    list(map(Holder.prop.fget, range(2)))
    exec(compile("take()", "<generated>", "exec"), {"take": take})
    return found


OPTIMIZER = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1)


def node_stack(core):
    core.active = True
    made = plain(core, torch.exp)(torch.ones(2, requires_grad=True)).grad_fn._sequence_nr()
    ((_, _, _, stack),) = core.nodes_near(made, threading.get_ident())
    return stack


def step_stack(core):
    core.step_begin(OPTIMIZER, (), {})
    return core.step_log[-1][5]


def write_stack(core):
    core.active = True
    core.writer(torch.Tensor.add_, "add_", "inplace", 0, None)(torch.ones(2), 1)
    return core.writes()[-1][-5]


def operator_stack(core):
    core.active = True
    tensor = torch.ones(2).as_subclass(OtherScratch if core.is_native else Scratch)
    tensor += 1
    return core.writes()[-1][-5]


class Scratch(torch.Tensor):
    """A place for writers that other tests do not see."""

    __torch_function__ = torch._C._disabled_torch_function_impl


class OtherScratch(Scratch):
    """A second such place."""


@pytest.mark.parametrize("how", [lambda core: core.stack(), node_stack, step_stack, write_stack, operator_stack])
def test_both_cores_take_the_same_stacks(both, how, monkeypatch):
    if how is operator_stack:
        for core, holder in zip(both, (Scratch, OtherScratch), strict=True):
            writer = core.writer(torch.Tensor.__iadd__, "__iadd__", "inplace", 0, None)
            monkeypatch.setattr(holder, "__iadd__", writer, raising=False)
    pairs = program(both, how)
    assert len(pairs) == 18
    for pure, native in pairs:
        assert pure.codes == native.codes
        assert places(pure) == places(native)
        assert pure.lastis[1:] == native.lastis[1:]
        if how is operator_stack:
            assert pure.lastis == native.lastis


def functions(count):
    """``count`` functions, each with a code object of its own, that call what they are given."""
    source = "\n".join(f"def f{number}(call): return call()" for number in range(count))
    names = {}
    exec(compile(source, "<many>", "exec"), names)
    return [names[f"f{number}"] for number in range(count)]


def test_the_stack_table_is_bounded(core):
    kept = constants(core).STACKS_KEPT
    side = int(kept**0.5) + 2
    ways = functions(side)

    def through(outer, inner):
        return outer(lambda: inner(core.stack))

    stacks = []
    for outer, inner in [(ways[0], ways[0])] * 50 + list(itertools.product(ways, ways)) + [(ways[0], ways[0])] * 2:
        stacks.append(through(outer, inner))
        assert stacks[-1].codes[0] is inner.__code__
        assert stacks[-1].codes[2] is outer.__code__
    *_, again, once_more = stacks
    assert stacks[48] is stacks[49]
    assert again is once_more
    assert again is not stacks[49]
    assert (again.codes, again.lastis) == (stacks[49].codes, stacks[49].lastis)


def test_a_stack_keeps_its_code_and_no_frame(core):
    class Mark:
        pass

    def fresh():
        mark = Mark()
        names = {"core": core, "mark": mark}
        exec(compile("def f():\n    here = mark\n    return core.stack()", "<short-lived>", "exec"), names)
        return names["f"](), weakref.ref(mark), weakref.ref(names["f"].__code__)

    stack, mark, code = fresh()
    gc.collect()
    assert mark() is None
    assert code() is stack.codes[0]
    assert stack.codes[0].co_filename == "<short-lived>"
    core.clear()
    del stack
    assert code() is None


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="starts a thread by pthread_create")
def test_a_thread_without_python_frames_has_an_empty_stack(core):
    """Called straight from a thread that C started, as torch's engine does for other devices."""
    core.active = True
    tensor = torch.ones(2)
    kept = []
    writer = core.writer(torch.add, "add", "out", -1, "out")
    step = functools.partial(core.step_begin, OPTIMIZER, (), {})
    node = functools.partial(kept.extend, map(plain(core, torch.exp), [torch.ones(2, requires_grad=True)]))
    library = ctypes.CDLL(None)
    for call in (step, node, functools.partial(writer, tensor, 1, out=tensor)):
        entry = ctypes.CFUNCTYPE(None)(call)
        thread = ctypes.c_void_p()
        assert library.pthread_create(ctypes.byref(thread), None, entry, None) == 0
        assert library.pthread_join(thread, None) == 0
    assert core.step_log[0][5].codes == ()
    assert kept[0].grad_fn is not None
    assert core.saves == 1
    assert [entry[10].codes for entry in core.writes()] == [()]
    assert core.log_errors == 0


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python tells them since 3.11")
def test_names_read_off_the_source_are_those_that_newer_pythons_tell():
    compared = 0
    for module in (torch.nn.modules.module, torch.utils.checkpoint, dataclasses, sys.modules[__name__]):
        file = module.__file__
        waiting = [compile(Path(file).read_text(encoding="utf-8"), file, "exec")]
        while waiting:
            code = waiting.pop()
            waiting += [one for one in code.co_consts if isinstance(one, CodeType)]
            is_function = code.co_flags & inspect.CO_OPTIMIZED and (
                code.co_name[0] != "<" or code.co_name == "<lambda>"
            )
            if is_function and "comp>" not in code.co_qualname and "<genexpr>" not in code.co_qualname:
                found = stacks._names_in(file)[code.co_firstlineno, code.co_name]
                assert found == code.co_qualname
                compared += 1
    assert compared > 200
