"""Options from command line, environment and file: what each may say, and which one wins."""

from __future__ import annotations

from pathlib import Path

import pytest

from cases import each
from gradsan.options import Options, OptionsError, environment_layer, file_layer, merged, read_options


def from_environment(text: str) -> dict[str, object]:
    return environment_layer({"GRADSAN_OPTIONS": text})


class TestEnvironment:
    @each(
        ("text", "layer"),
        [
            ("", {}),
            ("::", {}),
            ("quiet=1", {"quiet": True}),
            ("quiet=off:stacks=YES", {"quiet": False, "stacks": True}),
            ("exit-code=7:exit_code=8", {"exit_code": 8}),
            ("json=out/report.json:lang=zh:", {"json": "out/report.json", "lang": "zh"}),
            ("json='C:\\a b.json':color=never", {"json": "C:\\a b.json", "color": "never"}),
            ('json="a:b=c.json"', {"json": "a:b=c.json"}),
            (" lang = en : quiet = 0 ", {"lang": "en", "quiet": False}),
            ("json=it's:quiet=1", {"json": "it's", "quiet": True}),
        ],
    )
    def test_settings(self, text: str, layer: dict[str, object]) -> None:
        assert from_environment(text) == layer

    @each(
        "text", ["quiet", "quiet:lang=en", "=1", "lang=", "json=", "quiet=2", "exit-code=-1", "exit-code=٣", "help=1"]
    )
    def test_invalid_options_are_one_sentence(self, text: str) -> None:
        with pytest.raises(OptionsError):
            from_environment(text)


class TestFile:
    def test_nearest_with_a_table_decides(self, tmp_path: Path) -> None:
        inner = tmp_path / "a" / "b"
        inner.mkdir(parents=True)
        (tmp_path / "pyproject.toml").write_text("[tool.gradsan]\nquiet = true\njson = 'out.json'\n")
        (tmp_path / "a" / "pyproject.toml").write_text("[tool.other]\nx = 1\n")
        assert file_layer(inner) == {"quiet": True, "json": str(tmp_path / "out.json")}
        (tmp_path / "a" / "pyproject.toml").write_text("[tool.gradsan]\nexit-code = 3\n")
        assert file_layer(inner) == {"exit_code": 3}

    def test_nothing_to_read(self, tmp_path: Path) -> None:
        (tmp_path / "pyproject.toml").write_text("tool = 3\n")
        assert file_layer(tmp_path) == {}
        (tmp_path / "pyproject.toml").unlink()
        (tmp_path / "pyproject.toml").mkdir()
        assert file_layer(tmp_path) == {}

    @each("content", [b"[tool", b"\xff", b"[tool.gradsan]\nlang = 1", b"[tool.gradsan]\nquiet = 1"])
    def test_invalid_options_are_one_sentence(self, content: bytes, tmp_path: Path) -> None:
        (tmp_path / "pyproject.toml").write_bytes(content)
        with pytest.raises(OptionsError):
            file_layer(tmp_path)


def test_strength(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[tool.gradsan]\nlang = 'zh'\ncolor = 'never'\nstacks = true\n")
    environ = {"GRADSAN_OPTIONS": "color=always:exit-code=5"}
    options = read_options({"exit-code": "6", "stacks": False}, environ, tmp_path)
    assert options == Options(lang="zh", color="always", stacks=False, exit_code=6)
    assert read_options({}, {}, None) == Options() == merged()
