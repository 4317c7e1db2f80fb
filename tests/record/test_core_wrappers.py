"""Wrappers look, bind and pickle as what they wrap."""

import copy
import inspect
import pickle
import sys
import threading
import types
import warnings
import weakref
from unittest.mock import Mock

import pytest
import torch

from core_kit import constants, needs_native, plain
from gradsan import _torch
from gradsan.record import log
from gradsan.record._writer_pure import is_relay


def test_a_wrapper_looks_like_what_it_wraps(core):
    for original in (torch.Tensor.add_, torch.Tensor.__setitem__, torch.add, torch.nn.functional.dropout):
        wrapper = core.writer(original, "op", "inplace", 0, None)
        for name in ("__name__", "__qualname__", "__doc__"):
            assert getattr(wrapper, name) == getattr(original, name)
        assert wrapper._gradsan_original is original
        assert hasattr(wrapper, "__wrapped__") != core.is_native
        assert callable(wrapper)
        kind = type(original) if core.is_native else type(wrapper)
        assert wrapper.__class__ is kind
        for asked in (inspect.isbuiltin, inspect.isfunction, inspect.isroutine, inspect.ismethoddescriptor):
            assert not core.is_native or asked(wrapper) == asked(original), (asked, original)
    assert not core.is_native or inspect.getsource(wrapper) == inspect.getsource(torch.nn.functional.dropout)
    assert inspect.signature(wrapper) == inspect.signature(torch.nn.functional.dropout)
    assert wrapper.__module__ == "torch.nn.functional"
    assert weakref.ref(wrapper)() is wrapper
    assert copy.deepcopy(wrapper) is copy.copy(wrapper) is wrapper


def test_a_call_by_name_is_a_call(core):
    add_ = core.writer(torch.Tensor.add_, "add_", "inplace", 0, None)
    core.active = True
    tensor = torch.zeros(1)
    assert add_.__call__(tensor, 1) is tensor
    assert type(add_).__call__(add_, tensor, other=1) is tensor
    assert tensor.item() == 2
    assert len(core.writes()) == 2


def test_a_compiler_sees_through_a_wrapper(core, monkeypatch):
    monkeypatch.setattr(torch, "sigmoid", plain(core, torch.sigmoid))
    monkeypatch.setattr(torch, "add", core.writer(plain(core, torch.add), "add", "out", -1, "out"))
    core.active = True
    graphs = []

    def backend(module, _):
        graphs.append([node.target for node in module.graph.nodes if node.op == "call_function"])
        return module.forward

    torch._dynamo.reset()
    compiled = torch.compile(lambda x: torch.add(torch.sigmoid(x), 1), backend=backend, fullgraph=True)
    assert compiled(torch.zeros(2)).tolist() == [1.5, 1.5]
    ((first, second),) = graphs
    assert first == torch.sigmoid
    assert second == torch.add
    assert compiled(torch.ones(2)).shape == (2,)
    assert len(graphs) == 1, "a second call does not compile again"


def test_a_compiler_takes_a_method_of_the_class_for_the_tensors_own(core, monkeypatch):
    for name in ("mul_", "__sub__"):
        monkeypatch.setattr(torch.Tensor, name, core.writer(getattr(torch.Tensor, name), name, "inplace", 0, None))
    core.active = True
    torch._dynamo.reset()
    torch._dynamo.trace_rules.get_tensor_method.cache_clear()
    compiled = torch.compile(
        lambda x: torch.Tensor.__sub__(torch.Tensor.mul_(x + 1, 3), 1), backend="eager", fullgraph=True
    )
    assert compiled(torch.ones(2)).tolist() == [5, 5]
    torch._dynamo.trace_rules.get_tensor_method.cache_clear()


def test_a_wrapper_of_a_method_binds(core):
    class Holder(torch.Tensor):
        __torch_function__ = torch._C._disabled_torch_function_impl
        add_ = core.writer(torch.Tensor.add_, "add_", "inplace", 0, None)
        __setitem__ = core.writer(torch.Tensor.__setitem__, "__setitem__", "setitem", 0, None)

    core.active = True
    tensor = torch.zeros(3).as_subclass(Holder)
    assert tensor.add_(1) is tensor
    bound = tensor.add_
    assert isinstance(bound, types.BuiltinMethodType if core.is_native else types.MethodType)
    assert bound.__self__ is tensor
    bound(1)
    Holder.add_(tensor, other=1)
    tensor[1] = 9
    assert Holder.__dict__["add_"].__get__(None, Holder) is Holder.add_
    assert tensor.tolist() == [3, 9, 3]
    assert len(core.writes()) == 4


@needs_native
def test_a_method_got_from_a_tensor_is_as_without_a_wrapper():
    core, heard = log.make_core(True), []

    class Holder(torch.Tensor):
        __torch_function__ = torch._C._disabled_torch_function_impl
        addcmul_ = core.writer(torch.Tensor.addcmul_, "addcmul_", "inplace", 0, None)
        abs_ = core.writer(torch.Tensor.abs_, "abs_", "inplace", 0, None)
        apply_ = core.listener(torch.Tensor.apply_, None, lambda *told: heard.append(told[1:3]))

    class Plain(torch.Tensor):
        __torch_function__ = torch._C._disabled_torch_function_impl

    def told(kind):
        tensor = torch.ones(2).as_subclass(kind)
        method = tensor.addcmul_
        with pytest.raises(TypeError) as failed:
            getattr(tensor, "abs_")(1)  # noqa: B009
        apply = tensor.apply_
        apply(lambda value: value)
        return (
            (inspect.isbuiltin(method), inspect.ismethod(method), method.__self__ is tensor, method == tensor.addcmul_),
            (method.__name__, method.__qualname__.replace(kind.__name__, ""), hash(method) == hash(tensor.addcmul_)),
            repr(method).split(" at ")[0].replace(kind.__name__, ""),
            str(failed.value).replace(kind.__name__, ""),
            method(torch.ones(2), tensor2=torch.ones(2), value=3).tolist(),
        )

    core.active = True
    assert told(Holder) == told(Plain)
    assert [entry[3] for entry in core.writes()] == ["addcmul_"]
    assert [(type(args[0]), len(args), named) for args, named in heard] == [(Holder, 2, {})]
    # More arguments than fit beside the frame, and one that goes away with its only reference.
    with pytest.raises(TypeError, match="abs_"):
        torch.ones(2).as_subclass(Holder).abs_.__call__(*range(20))
    gone = weakref.ref(torch.ones(2).as_subclass(Holder))
    method = torch.ones(2).as_subclass(Holder).abs_
    kept = weakref.ref(method.__self__)
    del method
    assert gone() is None
    assert kept() is None


def test_a_wrapper_of_a_builtin_function_does_not_bind(core):
    class Holder:
        activation = core.writer(torch.sigmoid, "sigmoid", "out", -1, "out")
        dropout = core.writer(torch.nn.functional.dropout, "dropout", "out", -1, "out")

    core.active = True
    tensor = torch.zeros(1)
    assert Holder().activation(tensor).item() == 0.5
    Holder().activation(tensor, out=tensor)
    assert [entry[10].codes[0] for entry in core.writes()] == [sys._getframe().f_code]
    assert isinstance(Holder().dropout, types.MethodType)


def test_a_wrapper_of_a_builtin_pickles_as_the_builtin(core):
    for original in (torch.add, torch.relu_, torch._C._nn.gelu):
        wrapper = core.writer(original, "op", "inplace", 0, None)
        for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
            data = pickle.dumps(wrapper, protocol)
            assert b"gradsan" not in data
            assert pickle.loads(data) is original


def test_an_installed_wrapper_of_a_python_function_pickles_by_name(core, monkeypatch):
    wrapper = core.writer(torch.nn.functional.dropout, "dropout", "inplace", 0, None)
    monkeypatch.setattr(torch.nn.functional, "dropout", wrapper)
    assert pickle.loads(pickle.dumps(wrapper)) is wrapper


def test_a_wrapper_of_a_method_pickles_as_the_method(core):
    wrapper = core.writer(torch.Tensor.add_, "add_", "inplace", 0, None)
    assert pickle.loads(pickle.dumps(wrapper)) == torch.Tensor.add_


def test_a_wrapper_equals_what_it_wraps(core):
    """torch hands the wrapper to __torch_function__, where programs look functions up in tables they filled before."""
    wrapper = core.writer(torch.Tensor.add_, "add_", "inplace", 0, None)
    other = core.writer(torch.Tensor.add_, "add_", "inplace", 0, None)
    assert {torch.Tensor.add_: "found"}[wrapper] == "found"
    assert wrapper == other == torch.Tensor.add_ == wrapper
    assert wrapper != torch.Tensor.mul_
    assert wrapper != 3
    with pytest.raises(TypeError):
        sorted([wrapper, other])


def test_dunder_operators_are_watched_by_python_s_own_dispatch(core, monkeypatch):
    class Scratch(torch.Tensor):
        __torch_function__ = torch._C._disabled_torch_function_impl

    for name in ("__add__", "__radd__", "__getitem__", "__neg__", "__matmul__"):
        monkeypatch.setattr(Scratch, name, plain(core, getattr(torch.Tensor, name)), raising=False)
    core.active = True
    tensor = torch.ones(2, 2).as_subclass(Scratch).requires_grad_()
    operations = (
        lambda: tensor + 1,
        lambda: 1 + tensor,
        lambda: tensor[0, 1:],
        lambda: -tensor,
        lambda: tensor @ tensor,
    )
    plainly = (lambda t: t + 1, lambda t: 1 + t, lambda t: t[0, 1:], lambda t: -t, lambda t: t @ t)
    for count, (operation, without) in enumerate(zip(operations, plainly, strict=True), start=1):
        result = operation()
        assert torch.equal(result, without(torch.ones(2, 2)))
        ((first, end, _, stack),) = core.nodes_near(result.grad_fn._sequence_nr(), threading.get_ident())
        assert first <= result.grad_fn._sequence_nr() == end - 1
        assert stack.codes[:2] == (operation.__code__, sys._getframe().f_code)
        assert core.saves == count
    with pytest.raises(TypeError):
        tensor + object()
    with pytest.raises(IndexError):
        tensor[9]
    with pytest.raises(TypeError):
        Scratch.__getitem__(3, 0)
    assert core.saves == len(operations)


def test_a_reflected_operator_is_left_to_the_other_side(core, monkeypatch):
    """What the original answers with NotImplemented goes on to the other operand."""

    class Other:
        def __radd__(self, left):
            return "theirs"

    class Scratch(torch.Tensor):
        __torch_function__ = torch._C._disabled_torch_function_impl
        __add__ = plain(core, torch.Tensor.__add__)

    core.active = True
    assert torch.ones(1).as_subclass(Scratch) + Other() == "theirs"


class Cube(torch.autograd.Function):
    """A custom Function whose apply is watched through the class it inherits from."""

    @staticmethod
    def forward(ctx, value):
        ctx.save_for_backward(value)
        return value**3

    @staticmethod
    def backward(ctx, gradient):
        (value,) = ctx.saved_tensors
        return 3 * value**2 * gradient


def test_a_custom_function_s_apply_is_watched(core, monkeypatch):
    owner, name, function = _torch.function_apply()
    original = owner.apply
    monkeypatch.setattr(owner, name, classmethod(plain(core, function)))
    assert Cube.apply.__self__ is Cube
    assert Cube.apply.__doc__ == original.__doc__
    assert pickle.loads(pickle.dumps(Cube.apply)) == Cube.apply
    core.active = True
    leaf = torch.tensor([2.0], requires_grad=True)
    result = Cube.apply(leaf)
    ((_, _, _, stack),) = core.nodes_near(result.grad_fn._sequence_nr(), threading.get_ident())
    assert stack.codes[0] is sys._getframe().f_code
    result.backward()
    assert leaf.grad.tolist() == [12.0]


@needs_native
def test_native_calls_say_what_is_wrong_with_their_arguments():
    core = log.make_core(True)
    wrong = [
        lambda: core.stack(1, 2),
        lambda: core.stack(depth=1),
        lambda: core.stack("one"),
        lambda: core.stack(0, skip=1),
        lambda: core.log_write(torch.ones(1), "add_"),
        lambda: core.writer(1, "op", "kind", 0, None),
        lambda: core.writer(len, "op", "kind", "0", None),
        lambda: core.writer(len, "op", "kind", 0, 1),
        lambda: core.nodes_near(1),
        lambda: core.nodes_near("1", 0),
        lambda: core.ran_since(core.stack(), 1),
        lambda: core.ran_since(core.stack(), 1, None),
        lambda: core.step_begin(),
        lambda: core.step_end(),
        lambda: core.engine(),
        lambda: type(core)(1),
        lambda: constants(core).Stack((), ("a",)),
    ]
    for call in wrong:
        with pytest.raises((TypeError, AttributeError, ValueError)):
            call()


def test_stacks_can_be_made_by_hand(core):
    code = sys._getframe().f_code
    stack = constants(core).Stack((code, code), (2, -1))
    assert (stack.codes, stack.lastis) == ((code, code), (2, -1))


def test_calls_back_for_operators_that_are_not_quiet(core):
    core.active = True
    told = []
    core.on_operator = lambda args, kwargs: told.append((args, kwargs))

    def original(*args, **kwargs):
        return 7

    run = core.writer(original, "__call__", "operator", -1, None)
    operator = object()
    assert run(operator, 1, key=2) == 7
    assert told == [((operator, 1), {"key": 2})]
    core.quiet_operators.add(id(operator))
    assert run(operator, 1) == 7
    assert run() == 7
    assert len(told) == 1
    core.on_operator = lambda args, kwargs: 1 / 0
    assert run(object()) == 7
    assert core.log_errors == 1
    assert core.writes() == []


def test_a_listener_hears_of_calls(core):
    heard = []

    def before(args, kwargs):
        heard.append((args, kwargs))
        return kwargs.get("noted")

    def after(noted, args, kwargs, result):
        heard.append((noted, args, kwargs, result))

    listener = core.listener(lambda *args, noted=None: len(args), before, after)
    assert listener(1, 2) == 2
    assert heard == []
    core.active = True
    assert listener(1, 2) == 2
    assert heard == [((1, 2), {})]
    heard.clear()
    assert listener(1, noted="yes") == 1
    assert heard == [((1,), {"noted": "yes"}), ("yes", (1,), {"noted": "yes"}, 1)]
    heard.clear()
    assert core.listener(len, None, after)("abc") == 3
    assert heard == [(None, ("abc",), {}, 3)]
    with pytest.raises(TypeError, match="has no len"):
        core.listener(len, None, after)(1)
    assert len(heard) == 1


def test_a_relay_changes_what_a_hook_is_given_and_gives(core):
    answers, heard = [None], []

    def after(noted, given, result):
        heard.append((noted, given, result, core.stack(1).codes[0]))
        return -result

    here = sys._getframe().f_code
    relay = core.relay(len, lambda given: answers[0], after)
    assert relay("abc") == 3
    answers[0] = ("instead",)
    assert relay("abc") == "instead"
    assert heard == []
    answers[0] = ("ab", "noted")
    assert relay("abc") == -2
    assert heard.pop() == ("noted", "ab", 2, here)
    alone = core.relay(len, None, after)
    assert alone("abc") == 3
    core.active = True
    assert alone("abc") == -3
    assert heard == [(None, "abc", 3, here)]
    assert is_relay(relay)
    assert not any(map(is_relay, (len, core.listener(len, None, None), Mock(), warnings)))
    for broken in (core.relay(len, lambda _: 1 / 0, after), core.relay(len, None, lambda *_: 1 / 0)):
        with pytest.raises(ZeroDivisionError):
            broken("abc")
    with pytest.raises(TypeError):
        relay("abc", "d")


def test_what_a_listener_calls_is_neither_logged_nor_followed(core):
    core.active = True
    heard, x = [], torch.ones(2)
    add = core.writer(torch.Tensor.add_, "add_", "op", 0, None)
    inner = core.listener(len, None, lambda *told: heard.append(told[-1]))
    core.on_result = lambda op, *_: heard.append(op)

    def own(*_):
        add(x, 1)
        inner("ab")

    assert core.listener(len, own, None)("abc") == 3
    assert core.listener(len, None, own)("abc") == 3
    assert (x.tolist(), core.write_count, heard) == ([3, 3], 0, [])
    core.listener(len, lambda *_: 1 / 0, None)("abc")
    add(x, 1)
    assert (core.write_count, heard, inner("ab"), heard) == (1, ["add_", 2], 2, ["add_", 2])


def test_failures_in_a_listener_are_counted(core):
    core.active = True
    errors = core.log_errors
    assert core.listener(len, lambda args, kwargs: 1 / 0, None)("abc") == 3
    assert core.listener(len, None, lambda *_: 1 / 0)("abc") == 3
    assert core.log_errors == errors + 2
    for wrong in ((1, None, None), (len, 1, None), (len, None, 1)):
        if core.is_native:
            with pytest.raises(TypeError):
                core.listener(*wrong)


def test_a_listener_binds_and_looks_like_what_it_wraps(core):
    class Owner:
        method = core.listener(torch.nn.functional.dropout, None, None)
        function = core.listener(len, None, None)
        of_class = classmethod(core.listener(lambda kind: kind.__name__, None, None))

    owner = Owner()
    assert owner.function("ab") == 2
    assert isinstance(owner.method, types.MethodType)
    assert owner.of_class() == Owner.of_class() == "Owner"
    assert Owner.method == torch.nn.functional.dropout
    assert {torch.nn.functional.dropout: 1}[Owner.method] == 1
    assert inspect.signature(Owner.method) == inspect.signature(torch.nn.functional.dropout)
    for original in (torch.from_numpy, torch.Tensor.numpy, torch.Tensor.set_):
        assert pickle.loads(pickle.dumps(core.listener(original, None, None))) is original


def test_a_listener_takes_the_stack_of_who_called(core):
    stacks = []
    listener = core.listener(len, lambda *_: stacks.append(core.stack(1)), lambda *_: stacks.append(core.stack(1)))
    core.active = True
    listener("abc")
    inner = core.listener(listener, None, lambda *_: stacks.append(core.stack(1)))
    inner("abc")
    assert {stack.codes[0] for stack in stacks} == {sys._getframe().f_code}
    assert len(stacks) == 3


@needs_native
def test_no_frame_stands_between_a_caller_and_what_is_listened_to():
    core = log.make_core(native=True)
    core.active = True
    seen = []
    listener = core.listener(lambda: seen.append(sys._getframe(1)), lambda *_: True, lambda *_: None)
    listener()
    assert seen == [sys._getframe()]
