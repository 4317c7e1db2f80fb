"""Order of fixes: those that keep the training, then the smaller one, then the cheaper one."""

from dataclasses import replace

import pytest

from gradsan.model import Fix, Message, Verification
from gradsan.repair.judging import Tried
from gradsan.repair.patch import Patch
from gradsan.repair.ranking import measured, ranked_fixes
from gradsan.repair.trials.trial import Cost, Trial


def tried(tmp_path, kind, *, meaning="preserved", size=1, status="passed", further=False):
    file = tmp_path / f"{kind}{size}.py"
    file.write_text("a = 1\n" * 9)
    patch = Patch().with_lines(tuple((str(file), line, "b = 2") for line in range(1, size + 1)))
    fix = Fix(kind, meaning, Message("fix.summary"), verification=Verification(status=status))
    return Tried(fix, patch, Trial(0), passed=status == "passed", went_further=further)


def kinds(found):
    return [one.fix.kind for one in found]


def costs(**by_kind):
    def measure(patches):
        names = [next(iter(patch.files)).rpartition("/")[2] for patch in patches]
        return [next(cost for kind, cost in by_kind.items() if name.startswith(kind)) for name in names]

    return measure


def test_preserved_comes_first_and_what_did_not_hold_comes_last(tmp_path):
    several = [
        tried(tmp_path, "failed", status="failed"),
        tried(tmp_path, "further", status="failed", further=True),
        tried(tmp_path, "changed", meaning="changed"),
        tried(tmp_path, "preserved", size=5),
    ]
    assert kinds(ranked_fixes(several)) == ["preserved", "changed", "further", "failed"]


def test_the_smaller_one_comes_first_and_of_the_same_size_the_cheaper_one(tmp_path):
    several = [tried(tmp_path, "large", size=4), tried(tmp_path, "dear"), tried(tmp_path, "lean")]
    found = measured(several, costs(large=Cost(100, 100), dear=Cost(120, 100), lean=Cost(100, 100)))
    assert kinds(ranked_fixes(found)) == ["lean", "dear", "large"]
    assert found[1].fix.verification.time_ratio == pytest.approx(1.2)
    assert found[2].fix.verification.memory_ratio == 1.0
    # A copy of the whole in every round of a loop is not outweighed by the fewer lines that change.
    found = measured(several[:2], costs(large=Cost(100, 100), dear=Cost(140, 100)))
    assert kinds(ranked_fixes(found)) == ["large", "dear"]


def of_lines(tmp_path, kind, old, new):
    file = tmp_path / f"{kind}_lines.py"
    file.write_text("\n".join(old) + "\n")
    patch = Patch().with_lines(tuple((str(file), line, text) for line, text in enumerate(new, 1)))
    found = tried(tmp_path, kind)
    return replace(found, patch=patch)


def test_augmented_assignments_written_out_come_before_a_copy_and_several_parts_put_into_new_tensors_behind_it(
    tmp_path,
):
    copy = replace(tried(tmp_path, "clone_before_mutation"), fix=replace(tried(tmp_path, "copy").fix, kind="copy"))
    kept = {"time_ratio": 1.04, "memory_ratio": 1.04}
    copy = replace(copy, fix=replace(copy.fix, verification=replace(copy.fix.verification, **kept)))
    sums = of_lines(tmp_path, "out_of_place", ["x += y", "h.z *= 2"], ["x = x + y", "h.z = h.z * 2"])
    assert kinds(ranked_fixes([copy, sums])) == ["out_of_place", "copy"]
    other = of_lines(tmp_path, "out_of_place", ["x += y", "x = 3"], ["x = x + y", "x = 4"])
    assert kinds(ranked_fixes([other, copy])) == ["copy", "out_of_place"]
    one, two = "x = x.select_scatter(y, 0, 0)", "x = x.select_scatter(y, 0, 0).select_scatter(z, 0, 1)"
    part = of_lines(tmp_path, "out_of_place", ["x[0] = y"], [one])
    assert kinds(ranked_fixes([part, copy])) == ["out_of_place", "copy"]
    parts = of_lines(tmp_path, "out_of_place", ["x[0], x[1] = y, z"], [two])
    assert kinds(ranked_fixes([parts, copy])) == ["copy", "out_of_place"]


@pytest.mark.parametrize("second", [Cost(100, 100), None])
def test_a_difference_within_the_tolerance_does_not_decide(tmp_path, second):
    pair = [tried(tmp_path, "one"), tried(tmp_path, "second")]
    assert kinds(ranked_fixes(measured(pair, costs(one=Cost(102, 101), second=second)))) == ["one", "second"]


def test_one_that_keeps_its_meaning_alone_is_not_run_again(tmp_path):
    def never(patches):
        raise AssertionError(patches)

    pair = [tried(tmp_path, "one"), tried(tmp_path, "other", meaning="changed")]
    assert measured(pair, never) == pair


def told(found, training, difference=0.0):
    verification = replace(found.fix.verification, training=training, gradient_difference=difference)
    return replace(found, fix=replace(found.fix, verification=verification))


def test_the_same_training_comes_before_the_same_gradients_and_what_the_cause_implies_before_what_nobody_meant(
    tmp_path,
):
    several = [
        told(tried(tmp_path, "sum_losses", meaning="changed"), "changed", 0.1),
        told(tried(tmp_path, "recompute_forward", meaning="changed", size=3), "changed", 0.5),
        told(tried(tmp_path, "gradients"), "gradients"),
        told(tried(tmp_path, "same", size=5), "same"),
    ]
    assert kinds(ranked_fixes(several)) == ["same", "gradients", "recompute_forward", "sum_losses"]


def test_of_two_that_do_the_same_a_copy_comes_last(tmp_path):
    pair = [told(tried(tmp_path, "clone_before_mutation"), "same"), told(tried(tmp_path, "out_of_place"), "same")]
    assert kinds(ranked_fixes(pair)) == ["out_of_place", "clone_before_mutation"]


def test_for_a_changed_training_the_diagnosis_order_decides_before_difference_and_cost(tmp_path):
    pair = [tried(tmp_path, "advised", meaning="changed", size=3), tried(tmp_path, "cheap", meaning="changed")]
    again = replace(pair[0], fix=replace(pair[0].fix, summary=Message("fix.ran_to_end")))
    assert kinds(ranked_fixes([*pair, again])) == ["advised", "advised", "cheap"]


def test_after_a_refused_statement_the_diagnosis_order_decides_before_the_cost(tmp_path):
    pair = [tried(tmp_path, "meant"), tried(tmp_path, "cheap")]
    found = measured(pair, costs(meant=Cost(200, 200), cheap=Cost(100, 100)))
    assert kinds(ranked_fixes(found)) == ["cheap", "meant"]
    assert kinds(ranked_fixes(found, was_refused=True)) == ["meant", "cheap"]


def test_a_network_that_this_loss_is_not_to_train_is_cut_off_before_its_parameters_are_left_out(tmp_path):
    own, cut = tried(tmp_path, "backward_for_own"), tried(tmp_path, "detach_other_network", size=2)
    assert kinds(ranked_fixes([own, cut])) == ["detach_other_network", "backward_for_own"]
