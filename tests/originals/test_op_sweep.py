"""PyTorch's own samples of operators and modules in each mode, a seeded few of them: the same bits, nothing found."""

import importlib.util
import random

import pytest
import torch

from example_programs import ROOT

ALWAYS = ["op:nn.functional.ctc_loss", "module:nn.CTCLoss", "op:softmax", "op:std_mean"]


def _sweep():
    place = importlib.util.spec_from_file_location("op_sweep", ROOT / "tools" / "op_sweep.py")
    sweep = importlib.util.module_from_spec(place)
    place.loader.exec_module(sweep)
    return sweep


def test_an_unrepeatable_kernel_is_separated_from_a_mode_that_differs(monkeypatch):
    sweep = _sweep()
    calls = iter([0, 0, 1, 1, 0])  # two plain runs, the mode's, and both once more
    plain = type(torch.Tensor.sin)
    runs = [lambda: [torch.tensor(next(calls))], lambda: [torch.tensor(type(torch.Tensor.sin) is plain)]]
    monkeypatch.setattr(sweep, "_samples", lambda target, dtype, device: runs)
    told = sweep.sweep("op:none", dtypes=["float32"], modes=["watch"])
    assert told["unrepeatable"] == 1
    assert [number for _, _, number, _ in told["different"]] == [1]


@pytest.mark.long
def test_a_sample_of_all_operators_and_modules_is_as_plain():
    pytest.importorskip("expecttest")
    sweep = _sweep()
    known = [one for one in dict.fromkeys(sweep.targets()) if one not in ALWAYS]
    for name in ALWAYS + random.Random(13).sample(known, 36):
        told = sweep.sweep(name, dtypes=["float64", "complex64"], at_most=4)
        assert not told["different"], (name, told["different"][:3])
