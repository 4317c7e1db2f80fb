"""PyTorch's own samples of operators and modules in each mode, a seeded few of them: the same bits, nothing found."""

import importlib.util
import random

import pytest

from example_programs import ROOT

pytest.importorskip("expecttest")

ALWAYS = ["op:nn.functional.ctc_loss", "module:nn.CTCLoss", "op:softmax", "op:std_mean"]


@pytest.mark.long
def test_a_sample_of_all_operators_and_modules_is_as_plain():
    place = importlib.util.spec_from_file_location("op_sweep", ROOT / "tools" / "op_sweep.py")
    sweep = importlib.util.module_from_spec(place)
    place.loader.exec_module(sweep)
    known = [one for one in dict.fromkeys(sweep.targets()) if one not in ALWAYS]
    for name in ALWAYS + random.Random(13).sample(known, 36):
        told = sweep.sweep(name, dtypes=["float64", "complex64"], at_most=4)
        assert not told["different"], (name, told["different"][:3])
