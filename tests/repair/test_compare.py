"""Runs held against each other."""

import math
from array import array
from dataclasses import replace

import pytest

from cases import each
from gradsan.repair.compare import compare
from gradsan.repair.training import compare_trainings
from gradsan.repair.trials.trial import Gradients, Moment, Parameters, Recording, Value


def gradients(*values, key="step 2"):
    return Gradients(key, tuple(None if one is None else _one(one) for one in values))


def _one(numbers):
    return (len(numbers),), array("d", numbers).tobytes(), math.sqrt(sum(number**2 for number in numbers))


def run(*steps, finished=True, backwards=()):
    return Recording(steps=steps, backwards=backwards, finished=finished)


def test_the_same_gradients_are_equal():
    found = compare(run(gradients([1.0, 2.0])), run(gradients([1.0, 2.0])))
    assert found.is_equal
    assert (found.difference, found.lost, found.compared) == (0.0, 0, 1)


def test_rounding_is_no_difference_and_more_is():
    assert compare(run(gradients([3.0, 4.0])), run(gradients([3.0, 4.00001]))).is_equal
    found = compare(run(gradients([3.0, 4.0])), run(gradients([3.0, 4.5])))
    assert not found.is_equal
    assert found.difference == pytest.approx(0.1)


@pytest.mark.parametrize("candidate", [None, [0.0, 0.0]])
def test_a_gradient_that_is_gone_is_lost(candidate):
    found = compare(run(gradients([1.0, 1.0])), run(gradients(candidate)))
    assert found.lost == 1
    assert not found.is_equal


@each(
    ("candidate", "lost"),
    [
        ([[1.0], None, [1.0], [1.0]], 0),  # the loss of one round is zero but for the part that was cut
        ([[1.0], None, None, None], 3),  # a state is carried from the second round on
        ([[1.0], None, [1.0], None], 2),
    ],
)
def test_a_gradient_that_is_gone_in_few_rounds_is_another_one(candidate, lost):
    found = compare(run(*[gradients([1.0])] * 4), run(*map(gradients, candidate)))
    assert found.lost == lost
    assert not found.is_equal


def test_nothing_is_equal_to_a_reference_that_broke_off():
    found = compare(run(gradients([1.0]), finished=False), run(gradients([1.0])))
    assert not found.is_equal
    assert not found.has_reference


def test_all_steps_of_the_reference_must_have_been_compared():
    assert not compare(run(gradients([1.0]), gradients([1.0])), run(gradients([1.0]))).is_equal


def test_a_step_with_the_gradient_of_another_optimizer_is_mistaken():
    mine, other = [1.0, 2.0], [3.0, 4.0]

    def both(of_first, of_second):
        return run(gradients(of_first, key="step 2"), gradients(of_second, [1.0], key="step 2;1"))

    whole = both(mine, other)
    found = [compare(whole, both(*tried)).mistaken for tried in ((mine, other), (other, other), (mine, mine))]
    assert found == [0, 1, 1]
    # What both learn from the sum of the losses is neither's.
    assert compare(whole, both([4.0, 6.0], [4.0, 6.0])).mistaken == 0


def test_optimizers_are_matched_by_their_parameters():
    first, second = gradients([1.0], key="step 1"), gradients([2.0], key="step 3")
    assert compare(run(first, second), run(second, first)).is_equal


def test_programs_without_optimizers_are_compared_after_each_backward():
    one, other = gradients([1.0], key="backward"), gradients([2.0], key="backward")
    assert compare(run(backwards=(one,)), run(backwards=(one,))).is_equal
    assert not compare(run(backwards=(one,)), run(backwards=(other,))).is_equal


def test_nan_is_a_difference():
    assert compare(run(gradients([1.0])), run(gradients([math.nan]))).difference == math.inf


def test_leaves_are_matched_by_their_labels_in_any_order():
    right = Gradients("backward", gradients([1.0], [2.0], None).values, ("a", "b", "c"))
    turned = Gradients("backward", gradients([2.0], None, [1.0]).values, ("b", "c", "a"))
    swapped = Gradients("backward", gradients([1.0], None, [2.0]).values, ("b", "c", "a"))
    assert compare(run(backwards=(right,)), run(backwards=(turned,))).is_equal
    assert not compare(run(backwards=(right,)), run(backwards=(swapped,))).is_equal


def test_a_labelled_leaf_that_is_not_reached_any_more_is_lost():
    right = Gradients("backward", gradients([1.0], [2.0]).values, ("a", "b"))
    fewer = Gradients("backward", gradients([1.0]).values, ("a",))
    assert compare(run(backwards=(right,)), run(backwards=(fewer,))).lost == 1


def test_gradients_that_nobody_has_show_nothing():
    # Steps whose closure computes them later: both sides None is no equality that was measured.
    nothing = Recording(steps=(Gradients("step 3", (None,)),), finished=True)
    found = compare(nothing, nothing)
    assert found.difference is None
    assert not found.is_equal


@each(
    ("right", "tried", "is_equal"),
    [
        (gradients([1.0]), gradients([1.0]), True),
        (gradients([1.0]), gradients([2.0]), False),
        (gradients([1.0]), None, False),
        (gradients(None), gradients(None), False),
        (None, gradients([2.0]), True),
    ],
)
def test_gradients_left_after_the_last_step_count(right, tried, is_equal):
    step = (gradients([1.0, 2.0]),)
    found = compare(Recording(steps=step, finished=True, left=right), Recording(steps=step, finished=True, left=tried))
    assert found.is_equal is is_equal


@each(
    ("left", "other", "differs"),
    [
        ((gradients([1.0]),), (gradients([1.0]),), False),
        ((gradients([1.0]),), (gradients([2.0]),), True),
        ((gradients([1.0]),), (gradients(None),), True),
        ((gradients([0.0]),), (gradients(None),), False),
        ((gradients([1.0]),), (), False),
        ((gradients([1.0], key="step 1"),), (gradients([2.0]),), False),
    ],
)
def test_results_of_one_step_are_compared_where_no_later_one_follows(left, other, differs):
    step = gradients([1.0])
    found = compare(replace(run(step), undecided=left), replace(run(step), undecided=other))
    assert (found.left_differs, found.is_equal, found.difference) == (differs, not differs, 0)


def test_leftovers_are_not_named_for_runs_that_differ_anyway():
    right = replace(run(gradients([1.0])), undecided=(gradients([1.0]),))
    found = compare(right, replace(run(gradients([2.0])), undecided=(gradients([2.0]),)))
    assert (found.left_differs, found.is_equal) == (False, False)


def test_runs_that_the_limit_ended_after_different_steps_or_backwards_are_not_compared_at_their_ends():
    def ended(steps, begun=4):
        weight = Value((1,), "float32", steps, array("d", [float(steps), float(steps)]).tobytes())
        moments = (Moment((), 0, {"f: net.weight": replace(weight, checksum=0)}), Moment((("step 2", 1),), 0, {}))
        # With more backwards before its end, a run has made the steps of the other: one was moved behind a backward.
        end = Moment((("step 2", steps if begun == 4 else 3),), 1, {"f: net.weight": weight}, is_end=True, begun=begun)
        return Recording(finished=True, was_ended=True, moments=(*moments, end))

    assert compare_trainings(ended(3), ended(4)).differs_in == ()
    assert compare_trainings(ended(3), ended(4, begun=5)).differs_in == ()
    different = replace(ended(4), was_ended=False), replace(ended(3), was_ended=False)
    assert compare_trainings(*different).differs_in == ("net.weight",)


def test_a_parameter_may_be_written_before_a_backward_or_behind_it():
    def run(seen, stepped):
        def value(number):
            return Value((1,), "float32", number, array("d", [float(number), float(number)]).tobytes(), "leaf", 7)

        names = [Moment((("step 1", i),) if i else (), 0, {"f: net.weight": value(one)}) for i, one in enumerate(seen)]
        parameters = tuple(Parameters("step 1", (value(one),)) for one in stepped)
        return Recording(finished=True, moments=tuple(names), parameters=parameters)

    pruned, whole = run((2, 4, 6), (3, 5, 7)), run((1, 3, 5), (3, 5, 7))
    assert compare_trainings(pruned, whole).kept == ()
    assert compare_trainings(pruned, replace(whole, parameters=run((), (3, 5, 8)).parameters)).kept == ("net.weight",)


@each(
    "seen, frozen", [(((0, 5), (0, 6)), ()), (((0, 5), (0, 4)), ()), (((0, 5), (0, 5)), ("buf.acts[0]", "buf.acts[1]"))]
)
def test_a_list_is_no_longer_written_only_where_none_of_its_elements_changes(seen, frozen):
    def run(rounds):
        def value(number):
            return Value((), "int64", number, array("d", [float(number), float(number)]).tobytes())

        moments = [
            Moment((("step 1", i),), 0, {f"f: buf.acts[{k}]": value(one) for k, one in enumerate(acts)}, begun=i)
            for i, acts in enumerate(rounds)
        ]
        return Recording(finished=True, moments=(*moments, replace(moments[-1], ordinal=1, is_end=True)))

    assert compare_trainings(run(((0, 5), (1, 4))), run(seen)).frozen == frozen


@each(
    "line, other, is_same",
    [
        ("2 passed in 0.23s", "2 passed in 0.24s", True),
        ("step 10 | loss 2.5 | step time 36.99ms", "step 10 | loss 2.5 | step time 41.02ms", True),
        ("2026-11-29 16:00:01,123 loss 0.3", "2026-11-29 16:02:41,001 loss 0.3", True),
        ("100%|##| 8/8 [00:01<00:00, 5.31it/s, loss=0.3]", "100%|##| 8/8 [00:02<00:01, 4.1it/s, loss=0.3]", True),
        ("epoch 1 took 1m 3.2s (820 tokens/s), elapsed: 9.5", "epoch 1 took 58.9s (901 tokens/s), elapsed: 9.1", True),
        ("step 10 | loss 2.512 | step time 36.99ms", "step 10 | loss 2.612 | step time 36.99ms", False),
        ("accuracy 0.931 min 0.2 max 3", "accuracy 0.951 min 0.2 max 3", False),
        ("min 0.21 s 3.1", "min 0.33 s 3.1", False),
    ],
)
def test_times_that_a_program_prints_are_not_compared(line, other, is_same):
    training = compare_trainings(run(), run(), {"printed numbers": line}, {"printed numbers": other})
    assert training.numbers == (() if is_same else ("printed numbers",))


@each(
    ("small", "verdict"),
    [
        (1e-9, False),  # the bias of an attention's keys, which Adam moves as far as any other
        (0.1, True),
    ],
)
def test_a_parameter_whose_gradients_are_rounding_may_end_elsewhere(small, verdict):
    def ended(value):
        values = tuple(Value((1,), "float32", str(one), array("d", (one, abs(one))).tobytes()) for one in (2.0, value))
        return replace(run(gradients([3.0], [small])), parameters=(Parameters("step 2", values),))

    assert compare_trainings(ended(0.01), ended(-0.01)).parameters == verdict
