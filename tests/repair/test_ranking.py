"""Which fix comes first: what keeps the gradients, then the cheaper one, then the smaller one."""

from dataclasses import replace

import pytest

from gradsan.model import Fix, Message, Verification
from gradsan.repair.patch import Patch
from gradsan.repair.ranking import Tried, measured, ranked_fixes
from gradsan.repair.trial import Cost, Trial


def tried(tmp_path, kind, *, meaning="preserved", size=1, status="passed", further=False):
    file = tmp_path / f"{kind}{size}.py"
    file.write_text("a = 1\n" * 9)
    patch = Patch().with_lines(tuple((str(file), line, "b = 2") for line in range(1, size + 1)))
    fix = Fix(kind, meaning, Message("fix.summary"), verification=Verification(status=status))
    return Tried(fix, patch, Trial(0), passed=status == "passed", went_further=further)


def kinds(found):
    return [one.fix.kind for one in found]


def costs(**by_kind):
    def measure(patch):
        name = next(iter(patch.files)).rpartition("/")[2]
        return next(cost for kind, cost in by_kind.items() if name.startswith(kind))

    return measure


def test_preserved_comes_first_and_what_did_not_hold_comes_last(tmp_path):
    several = [
        tried(tmp_path, "failed", status="failed"),
        tried(tmp_path, "further", status="failed", further=True),
        tried(tmp_path, "changed", meaning="changed"),
        tried(tmp_path, "preserved", size=5),
    ]
    assert kinds(ranked_fixes(several)) == ["preserved", "changed", "further", "failed"]


def test_the_cheaper_one_comes_before_the_smaller_one(tmp_path):
    pair = [tried(tmp_path, "small"), tried(tmp_path, "lean", size=4)]
    found = measured(pair, costs(small=Cost(140, 100), lean=Cost(100, 100)))
    assert kinds(ranked_fixes(found)) == ["lean", "small"]
    assert found[0].fix.verification.time_ratio == pytest.approx(1.4)
    assert found[1].fix.verification.memory_ratio == 1.0


@pytest.mark.parametrize("lean", [Cost(100, 100), None])
def test_a_difference_within_the_tolerance_does_not_decide(tmp_path, lean):
    pair = [tried(tmp_path, "lean", size=4), tried(tmp_path, "small")]
    assert kinds(ranked_fixes(measured(pair, costs(small=Cost(102, 101), lean=lean)))) == ["small", "lean"]


def test_one_that_keeps_its_meaning_alone_is_not_run_again(tmp_path):
    def never(patch):
        raise AssertionError(patch)

    pair = [tried(tmp_path, "one"), tried(tmp_path, "other", meaning="changed")]
    assert measured(pair, never) == pair


def test_where_the_gradients_change_the_diagnosis_order_decides_before_the_cost(tmp_path):
    pair = [tried(tmp_path, "advised", meaning="changed", size=3), tried(tmp_path, "cheap", meaning="changed")]
    again = replace(pair[0], fix=replace(pair[0].fix, summary=Message("fix.ran_to_end")))
    found = measured([*pair, again], costs(advised=Cost(200, 200), cheap=Cost(100, 100)))
    assert kinds(ranked_fixes(found)) == ["advised", "advised", "cheap"]


def test_where_a_statement_was_refused_the_diagnosis_order_decides_before_the_cost(tmp_path):
    pair = [tried(tmp_path, "meant", size=3), tried(tmp_path, "cheap")]
    found = measured(pair, costs(meant=Cost(200, 200), cheap=Cost(100, 100)))
    assert kinds(ranked_fixes(found)) == ["cheap", "meant"]
    assert kinds(ranked_fixes(found, was_refused=True)) == ["meant", "cheap"]
