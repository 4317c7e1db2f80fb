"""The log of Nodes by the call that made them, in both cores."""

import ctypes
import sys
import threading

import pytest
import torch

from core_kit import needs_native, plain
from forked import call_forked
from gradsan import _torch
from gradsan.record import _core_pure, log

HERE = threading.get_ident


def sequence():
    return torch._C._autograd._get_sequence_nr()


def number(tensor):
    return tensor.grad_fn._sequence_nr()


def near(core, tensor):
    return core.nodes_near(number(tensor), HERE())


def after_another(first, then):
    """Run two functions in threads one after the other, the second with the ident of the first."""
    for _ in range(100):
        idents = []
        for work in (first, then):
            thread = threading.Thread(target=work)
            thread.start()
            idents.append(thread.ident)
            thread.join()
        if idents[0] == idents[1]:
            return
    pytest.skip("idents of threads are not used again")


@pytest.fixture
def leaf():
    return torch.ones(3, requires_grad=True)


@pytest.fixture
def exp(core):
    core.active = True
    return plain(core, torch.exp)


def test_a_call_that_makes_one_node(core, exp, leaf):
    result = exp(leaf)
    ((first, end, clock, stack),) = near(core, result)
    assert (first, end, clock) == (number(result), number(result) + 1, core.clock)
    assert stack.codes[0] is sys._getframe().f_code
    assert core.saves == 1


def test_a_call_that_makes_several_nodes(core, exp, leaf):
    loss = plain(core, torch._C._nn.cross_entropy_loss)
    result = loss(leaf[None], torch.tensor([0]), None, 1, -100, 0.0)
    inner = result.grad_fn.next_functions[0][0]
    assert inner._sequence_nr() == number(result) - 1
    ((first, end, _, _),) = near(core, result)
    assert (first, end) == (inner._sequence_nr(), number(result) + 1)
    assert core.nodes_near(first, HERE()) == near(core, result)


def test_a_call_within_a_call_is_logged_once_where_it_made_all_nodes(core, exp, leaf):
    def outer(value):
        return exp(value)

    result = plain(core, outer)(leaf)
    ((_, _, _, stack),) = near(core, result)
    assert core.saves == 1
    assert stack.codes[0] is outer.__code__


def test_of_calls_within_calls_the_innermost_made_the_node(core, exp, leaf):
    def outer(value):
        first = exp(value)
        between = torch.sin(first)
        return first, between, exp(between)

    results = plain(core, outer)(leaf)
    begin = number(results[0])
    found = [near(core, result) for result in results]
    assert [len(entries) for entries in found] == [1, 1, 1]
    assert [entries[0][:2] for entries in found] == [(begin, begin + 1), (begin, begin + 3), (begin + 2, begin + 3)]
    assert [entries[0][3].codes[0] for entries in found] == [outer.__code__, sys._getframe().f_code, outer.__code__]
    assert core.saves == 3


def test_an_unwatched_node_has_neighbours(core, exp, leaf):
    begin = sequence()
    early = torch.sin(leaf)
    one = exp(early)
    between = torch.sin(torch.sin(one))
    two = exp(between)
    late = torch.sin(two)
    assert near(core, between) == near(core, one) + near(core, two)
    assert near(core, early) == near(core, one)
    assert near(core, late) == near(core, two)
    assert core.nodes_near(begin - 1, HERE()) == near(core, one)


def test_a_loop_is_one_entry(core, exp, leaf):
    def loop(times):
        results = []
        for _ in range(times):
            results.append(exp(leaf))
        return results

    loop(50)  # before 3.12 a call site moves by one instruction once it is specialised
    begin, clock = sequence(), core.clock
    results = loop(20)
    assert core.clock == clock + 1
    assert core.saves == 70
    ((first, end, _, _),) = near(core, results[0])
    assert (first, end) == (begin, begin + 20)
    assert near(core, results[0]) == near(core, results[-1])


def test_other_nodes_split_a_loop(core, exp, leaf):
    entries = set()
    for turn in range(60):
        result = exp(leaf)
        if turn % 2:
            core.tick()
        elif turn % 3:
            torch.sin(leaf)
        entries.add(near(core, result)[0][:3])
    assert len(entries) >= 50


def test_no_grad_makes_no_entry(core, exp, leaf):
    begin = sequence()
    with torch.no_grad():
        exp(leaf)
    exp(leaf.detach())
    assert (core.saves, core.clock) == (0, 0)
    assert core.nodes_near(begin, HERE()) == []


def test_nothing_is_logged_while_inactive_or_when_the_call_raises(core, exp, leaf):
    with pytest.raises(TypeError):
        exp(leaf, leaf, leaf)
    core.active = False
    exp(leaf)
    assert core.saves == 0


def test_a_call_that_switches_off_is_not_logged(core, exp, leaf):
    def off(value):
        core.active = False
        return value.sin()

    plain(core, off)(leaf)
    assert core.saves == 0


def test_a_writing_operation_logs_its_node_before_its_write(core, exp, leaf):
    value = leaf * 1
    core.writer(torch.Tensor.mul_, "mul_", "inplace", 0, None)(value, 2)
    ((_, end, clock, stack),) = near(core, value)
    (write,) = core.writes()
    assert (write[0], write[11], write[10]) == (clock + 1, end, stack)


def test_ran_since(core, exp, leaf):
    def forward():
        return exp(leaf)

    for _ in range(50):
        first = forward()
    ((_, _, _, stack),) = near(core, first)
    middle = sequence()
    assert not core.ran_since(stack, middle, HERE())
    for _ in range(2):
        core.tick()
        last = near(core, forward())[0][3]
        exp(leaf)
    assert not core.ran_since(stack, sequence(), HERE())
    assert not core.ran_since(stack, middle, HERE())  # another line of this test called it
    assert core.ran_since(last, middle, HERE())
    assert not core.ran_since(last, middle, HERE() + 1)


def test_each_thread_counts_its_own_nodes(core, exp):
    found = {}
    barrier = threading.Barrier(3)

    def work(name):
        leaf = torch.ones(2, requires_grad=True)
        barrier.wait()
        results = [exp(leaf), torch.sin(leaf), exp(leaf)]
        found[name] = [number(result) for result in results], HERE()
        barrier.wait()

    threads = [threading.Thread(target=work, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # The numbers of a new thread begin anew: without the thread they would name each other's Nodes.
    assert len({tuple(numbers) for numbers, _ in found.values()}) == 1
    clocks = set()
    for numbers, thread in found.values():
        exact = [core.nodes_near(one, thread) for one in numbers]
        assert [len(entries) for entries in exact] == [1, 2, 1]
        assert exact[1] == exact[0] + exact[2]
        clocks |= {entries[0][2] for entries in exact}
    assert len(clocks) == 6
    assert core.nodes_near(0, HERE() + 1) == []


def test_nodes_of_a_thread_that_has_ended_are_not_those_of_one_with_its_ident(core, exp):
    found = []

    def made():
        exp(torch.ones(2, requires_grad=True))

    def asked():
        found.append(core.nodes_near(0, HERE()))

    after_another(made, asked)
    assert found[-1] == []


def test_the_pure_log_is_bounded(monkeypatch, leaf):
    monkeypatch.setattr(_core_pure, "NODES_KEPT", 100)
    fill_and_check(log.make_core(False), leaf, 100)


@needs_native
def test_the_native_log_is_bounded(leaf):
    fill_and_check(log.make_core(True), leaf, _core_pure.NODES_KEPT)


def fill_and_check(core, leaf, kept):
    core.active = True
    alias = plain(core, torch.Tensor.__getitem__)
    begin = sequence()
    for _ in range(kept // 2 + 5):
        alias(leaf, 0)
        alias(leaf, 1)
    assert core.saves == kept + 10
    oldest = begin + 10
    assert [entry[:2] for entry in core.nodes_near(oldest, HERE())] == [(oldest, oldest + 1)]
    assert [entry[:2] for entry in core.nodes_near(oldest - 1, HERE())] == [(oldest, oldest + 1)]
    last = sequence() - 1
    assert [entry[:2] for entry in core.nodes_near(last, HERE())] == [(last, last + 1)]


def test_both_cores_log_the_same_nodes(both, leaf):
    logs = []
    for core in both:
        core.active = True
        exp, begin = plain(core, torch.exp), sequence()
        value = leaf
        for turn in range(12):
            value = exp(value) if turn % 3 else torch.sin(value)
            if turn == 5:
                core.tick()
        found = [core.nodes_near(n, HERE()) for n in range(begin, sequence())]
        logs.append([[(first - begin, end - begin, clock) for first, end, clock, _ in entries] for entries in found])
    assert logs[0] == logs[1]


def test_failures_while_a_node_is_logged_are_counted(core, exp, leaf, monkeypatch):
    if core.is_native:
        pytest.skip("in C nothing of it can be made to fail from here but memory")
    monkeypatch.setattr(core, "stack_from", lambda frame: 1 / 0)
    assert exp(leaf).grad_fn is not None
    assert core.log_errors == 1
    assert core.saves == 0


def test_the_address_of_the_sequence_number_answers_like_python_in_each_thread(leaf):
    address = _torch.sequence_number_address()
    if not address:
        pytest.skip("the library of torch is not found by its name here")
    peek = ctypes.CFUNCTYPE(ctypes.c_uint64)(address)
    answers = []

    def ask():
        made = torch.exp(leaf)
        answers.append((peek(), sequence(), number(made) + 1))

    for _ in range(2):
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
        ask()
    assert all(len(set(one)) == 1 for one in answers)


def nodes_logged_without_an_address(finds_address):
    if not finds_address:
        _torch.sequence_number_address = lambda: 0  # before the first core of this process
    core = log.make_core(native=True)
    core.active = True
    made = plain(core, torch.exp)(torch.ones(3, requires_grad=True))
    return core.saves, [entry[:2] for entry in core.nodes_near(number(made), HERE())], number(made)


@needs_native
def test_the_native_core_finds_the_nodes_without_the_address_too():
    for finds in (True, False):
        saves, logged, made = call_forked(nodes_logged_without_an_address, finds)
        assert (saves, logged) == (1, [(made, made + 1)])
