"""Running ``gradsan run`` and plain python side by side, each in a process of its own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from side_by_side import Outcome, Runner, run_process

from forked import warm_python

HERE = Path(__file__).parent


@pytest.fixture
def run_python(tmp_path: Path) -> Runner:
    """Run ``python`` with these words, in ``tmp_path`` unless told otherwise; warm with torch imported already."""

    def run(
        *words: str, cwd: Path = tmp_path, env: Mapping[str, str] | None = None, stdin: str = "", is_warm: bool = False
    ) -> Outcome:
        return run_process(words, cwd, env, stdin, is_warm=is_warm)

    return run


@pytest.fixture
def run_gradsan(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Runner:
    """Run ``python -m gradsan`` with these words, in ``tmp_path`` unless told otherwise; a missing sentence fails."""
    own = {"GRADSAN_TEXT": "strict", "XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache"))}

    def run(*words: str, cwd: Path = tmp_path, env: Mapping[str, str] | None = None, stdin: str = "") -> Outcome:
        return run_process(("-m", "gradsan", *words), cwd, {**own, **(env or {})}, stdin)

    return run


@pytest.fixture
def run_warm(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Runner:
    """As ``run_gradsan``, with torch imported already: where what is tested is not how a program is started."""
    own = {"GRADSAN_TEXT": "strict", "XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache"))}

    def run(*words: str, cwd: Path = tmp_path, env: Mapping[str, str] | None = None, stdin: str = "") -> Outcome:
        return run_process(("-m", "gradsan", *words), cwd, {**own, **(env or {})}, stdin, is_warm=True)

    return run


@pytest.fixture
def run_warm_search(run_warm: Runner) -> Runner:
    """As ``run_warm``, and so are the processes in which ``gradsan fix`` and ``gradsan compare`` run the program."""
    _, env = warm_python()

    def run(*words: str, **settings: object) -> Outcome:
        return run_warm(*words, **{**settings, "env": {**env, **(settings.get("env") or {})}})

    return run


@pytest.fixture
def run_warm_compiler(run_warm_search: Runner) -> Runner:
    """As ``run_warm_search``, with torch.compile's machinery imported already."""
    return lambda *words, **settings: run_warm_search(*words, **{**settings, "env": {"WARM_KIND": "compiled commands"}})


@pytest.fixture
def run_with_session(tmp_path: Path) -> Runner:
    """Run ``gradsan`` with these words and a session that behaves as ``session`` says (see fake_session.py).

    A package named torch, empty but for its name, stands in ``tmp_path`` for programs to import. The process is a fork
    of one that has imported what a report needs; of the kind "started" only what ``gradsan run`` needs before it.
    """
    (tmp_path / "torch").mkdir(exist_ok=True)
    (tmp_path / "torch" / "__init__.py").touch()

    def run(
        session: str,
        *words: str,
        cwd: Path = tmp_path,
        env: Mapping[str, str] | None = None,
        stdin: str = "",
        kind: str = "reporting",
    ) -> Outcome:
        # An interpreter reads these when it starts.
        is_warm = not any(name.startswith("PYTHON") for name in env or ())
        return run_process(
            (str(HERE / "fake_session.py"), session, *words), cwd, env, stdin, is_warm=is_warm, kind=kind
        )

    return run


@pytest.fixture
def run_started(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Runner:
    """As ``run_gradsan``, in a fork of a process that has imported what ``gradsan run`` needs before the program."""
    own = {"GRADSAN_TEXT": "strict", "XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache"))}

    def run(*words: str, cwd: Path = tmp_path, stdin: str = "") -> Outcome:
        return run_process(("-m", "gradsan", *words), cwd, own, stdin, is_warm=True, kind="started")

    return run


@pytest.fixture
def warm_beside_python(run_python: Runner, run_started: Runner) -> Runner:
    """As ``beside_python``, where neither the start nor the end of the interpreter is what is compared."""

    def run(*words: str, **settings: object) -> Outcome:
        plain = run_python(*words, **settings)
        watched = run_started("run", *words, **settings)
        assert watched == plain
        return plain

    return run


@pytest.fixture
def beside_python(run_python: Runner, run_gradsan: Runner) -> Runner:
    """Run the same words under python and under ``gradsan run``; they must leave the same behind. Returns python's."""

    def run(*words: str, **settings: object) -> Outcome:
        plain = run_python(*words, **settings)
        watched = run_gradsan("run", *words, **settings)
        assert watched == plain
        return plain

    return run
