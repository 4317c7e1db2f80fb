"""``gradsan run --early``, ``--heal-only`` and ``--max-bytes``, and the same in the environment and in files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from side_by_side import Runner

from cases import each
from gradsan.options import Options, OptionsError, environment_layer, file_layer, read_options

TWO = """\
import torch
x = torch.ones(4, requires_grad=True)
y = x.exp()
y.detach().mul_(2)
print("written")
y.sum().backward()
print("first", x.grad.sum().item())
z = x * 2
loss = (z * z).sum()
z.detach().mul_(2)
loss.backward()
print("second", x.grad.sum().item())
"""


@pytest.fixture(autouse=True)
def program(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TWO)


def test_early_ends_it_at_the_write(run_warm: Runner) -> None:
    ended = run_warm("run", "--early", "train.py")
    assert (ended.status, ended.stdout) == (66, "")
    assert "gradsan.HaltError" in ended.stderr
    assert "error[GS101]" in ended.stderr


@pytest.mark.parametrize("rules", ["GS101", "train.py:4", "GS1xx:train.py:4", "GS110,train.py:4"])
def test_one_is_healed_and_the_other_ends_it(run_warm: Runner, rules: str) -> None:
    ended = run_warm("run", "--heal-only", rules, "train.py")
    assert ended.status == 1
    assert [line.split()[0] for line in ended.stdout.splitlines()] == ["written", "first"]
    assert "warning[GS101]" in ended.stderr
    assert "error[GS102]" in ended.stderr


def test_both_are_healed(run_warm: Runner) -> None:
    healed = run_warm("run", "--heal", "train.py")
    named = run_warm("run", "--heal-only=train.py", "train.py")
    assert (healed.status, named.status) == (66, 66)
    assert healed.stdout == named.stdout
    assert healed.stdout.splitlines()[-1].startswith("second")


def test_the_bound_ends_it(run_warm: Runner) -> None:
    ended = run_warm("run", "--heal", "--max-bytes", "15", "train.py")
    assert ended.status == 1
    assert "gradsan.HealingEndedError: healing has ended" in ended.stderr
    assert "src/gradsan/" not in ended.stderr
    assert run_warm("run", "--heal", "--max-bytes", "1K", "train.py").status == 66


def test_other_places_to_say_it(run_warm: Runner, tmp_path: Path) -> None:
    settings = {"GRADSAN_OPTIONS": 'heal-only="GS101,train.py:10":max-bytes=1M'}
    assert run_warm("run", "train.py", env=settings).status == 66
    (tmp_path / "pyproject.toml").write_text('[tool.gradsan]\nheal-only = ["GS101"]\nmax-bytes = "1K"\n')
    assert run_warm("run", "train.py").status == 1
    assert run_warm("run", "--heal-only", "*", "train.py").status == 66


@each(
    ("said", "size"),
    [("7", 7), (7, 7), ("2G", 2**31), ("1.5k", 1536), (" 3 MiB ", 3 * 2**20), ("1 TB", 2**40), ("10mb", 10 * 2**20)],
)
def test_sizes(said: Any, size: int) -> None:
    assert read_options({"max-bytes": said}, {}, None) == Options(max_bytes=size)


@each("said", ["0", "-1", "2X", "", "G", "0.1", True, 1.5, "1e9", "٣"])
def test_invalid_sizes_are_refused(said: Any) -> None:
    with pytest.raises(OptionsError):
        read_options({"max-bytes": said}, {}, None)


@each("said", ["", ",", "GS1", [], [1], 7])
def test_invalid_scopes_are_refused(said: Any) -> None:
    with pytest.raises(OptionsError):
        read_options({"heal-only": said}, {}, None)


def test_switches_in_the_environment_and_in_files(tmp_path: Path) -> None:
    assert environment_layer({"GRADSAN_OPTIONS": "halt=1:early=yes:strict=off"}) == {
        "halt": True,
        "early": True,
        "strict": False,
    }
    (tmp_path / "pyproject.toml").write_text("[tool.gradsan]\nhalt = true\nstrict = true\n")
    assert file_layer(tmp_path) == {"halt": True, "strict": True}
