"""When ``gradsan run`` speaks, what it writes where, and its status; with a session made for the test."""

from __future__ import annotations

import json
import stat
import textwrap
from datetime import datetime
from pathlib import Path

import pytest
from side_by_side import Runner

from cases import each


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "main.py"
    path.write_text("import torch\nprint('ran')\n")
    return path


class TestStatus:
    @each(
        ("session", "options", "status"),
        [
            ("nothing", [], 0),
            ("error", [], 66),
            ("warning", [], 66),
            ("note", [], 0),
            ("error", ["--exit-code", "9"], 9),
            ("error", ["--exit-code=0"], 0),
        ],
    )
    def test_of_a_program_that_finished(
        self, session: str, options: list[str], status: int, program: Path, run_with_session: Runner
    ) -> None:
        outcome = run_with_session(session, "run", *options, "main.py")
        assert outcome.status == status
        assert outcome.stdout == "ran\n"
        assert ("THE TITLE" in outcome.stderr) == (session != "nothing")

    @each(("end", "status"), [("1 / 0", 1), ("raise SystemExit(3)", 3), ("raise SystemExit('x')", 1), ("exit(0)", 66)])
    def test_the_programs_own_comes_first(self, end: str, status: int, program: Path, run_with_session: Runner) -> None:
        program.write_text(f"import torch\n{end}\n")
        outcome = run_with_session("error", "run", "main.py")
        assert outcome.status == status
        assert "THE TITLE" in outcome.stderr

    def test_a_program_without_torch_is_left_alone(self, tmp_path: Path, run_with_session: Runner) -> None:
        outcome = run_with_session("error", "run", "--json", "out.json", "-c", "print('ran')")
        assert (outcome.stdout, outcome.stderr, outcome.status) == ("ran\n", "", 0)
        spots = json.loads((tmp_path / "out.json").read_text())["seen"]["blind_spots"]
        assert spots == ["this process never imported torch, so nothing was watched in it"]


class TestOrder:
    def test_traceback_comes_before_the_report(
        self, program: Path, run_python: Runner, run_with_session: Runner
    ) -> None:
        program.write_text("import torch\ndef f():\n    1 / 0\nf()\n")
        plain, watched = run_python("main.py"), run_with_session("error", "run", "main.py")
        assert watched.stderr.startswith(plain.stderr)
        assert "THE TITLE" in watched.stderr[len(plain.stderr) :]

    def test_threads_are_waited_for(self, program: Path, run_with_session: Runner) -> None:
        program.write_text(
            textwrap.dedent(
                """
                import sys, threading, time, torch
                def work():
                    time.sleep(0.3)
                    print("thread", file=sys.stderr)
                threading.Thread(target=work).start()
                """
            )
        )
        assert run_with_session("error", "run", "main.py").stderr.startswith("thread\n")

    def test_output_of_the_program_comes_before_the_report(self, program: Path, run_with_session: Runner) -> None:
        program.write_text("import os, torch\nos.dup2(2, 1)\nprint('buffered')\n")
        assert run_with_session("error", "run", "main.py").stderr.startswith("buffered\n")


class TestTorchImport:
    def test_environment_and_filters_set_before_it_count(self, program: Path, run_with_session: Runner) -> None:
        (program.parent / "torch" / "__init__.py").write_text("import os\nprint(os.environ['SET_BY_PROGRAM'])\n")
        program.write_text("import os\nos.environ['SET_BY_PROGRAM'] = 'yes'\nimport torch\n")
        assert run_with_session("nothing", "run", "main.py").stdout == "yes\n"

    def test_leaves_no_trace(self, program: Path, run_python: Runner, run_with_session: Runner) -> None:
        program.write_text(
            textwrap.dedent(
                """
                import importlib.util, sys
                print(importlib.util.find_spec("torch").name)
                import torch
                print(type(torch.__loader__).__name__, torch.__loader__ is torch.__spec__.loader, torch.__file__)
                print([finder for finder in sys.meta_path if "gradsan" in getattr(finder, "__module__", "")])
                """
            )
        )
        plain, watched = run_python("main.py"), run_with_session("nothing", "run", "main.py")
        assert watched == plain
        assert watched.stdout.endswith("[]\n")

    @each("failure", ["raise ImportError('no')", "1 / 0", "x = = 1", "import no_such_module"])
    def test_failures_look_as_under_python(
        self, failure: str, program: Path, run_python: Runner, run_with_session: Runner
    ) -> None:
        (program.parent / "torch" / "__init__.py").write_text(failure)
        plain, watched = run_python("main.py"), run_with_session("error", "run", "main.py")
        assert watched == plain
        assert plain.status == 1

    def test_gradsan_under_gradsan(self, program: Path, run_with_session: Runner) -> None:
        outcome = run_with_session("error", "run", "-m", "gradsan", "run", "--json", "inner.json", "main.py")
        assert (outcome.stdout, outcome.status) == ("ran\n", 66)
        assert "RecursionError" not in outcome.stderr
        assert (program.parent / "inner.json").exists()

    def test_a_second_try_is_watched(self, program: Path, run_with_session: Runner) -> None:
        (program.parent / "torch" / "__init__.py").write_text(
            "import sys\nif len(sys.argv) == 2: sys.argv.pop(); 1 / 0\n"
        )
        program.write_text("try:\n    import torch\nexcept ZeroDivisionError:\n    import torch\n")
        assert run_with_session("error", "run", "main.py", "a").status == 66


class TestFailuresOfGradsan:
    @each("what", ["start", "stop", "report"])
    @each(("end", "status"), [("print('end')", 0), ("raise SystemExit(5)", 5)])
    def test_are_one_sentence(self, what: str, end: str, status: int, program: Path, run_with_session: Runner) -> None:
        program.write_text(f"import torch\n{end}\n")
        outcome = run_with_session(f"{what} fails", "run", "--json", "out.json", "main.py")
        assert outcome.status == status
        assert outcome.stdout == ("end\n" if status == 0 else "")
        assert outcome.stderr.startswith("gradsan: ")
        assert outcome.stderr.count("\n") == 1
        assert f"(LookupError: broken {what})" in outcome.stderr
        assert json.loads((program.parent / "out.json").read_text())["diagnoses"] == []

    def test_the_real_session_on_a_broken_torch(
        self, program: Path, run_with_session: Runner, run_gradsan: Runner
    ) -> None:
        outcome = run_gradsan("run", "main.py")
        assert (outcome.stdout, outcome.status) == ("ran\n", 0)
        assert outcome.stderr.count("\n") == 1
        assert outcome.stderr.startswith("gradsan: watching could not begin (")

    def test_torch_that_is_not_installed(self, run_python: Runner) -> None:
        code = "from gradsan import cli; sys.exit(cli.main(['run', '-c', 'print(1)']))"
        outcome = run_python("-c", f"import sys; sys.modules['torch'] = None; {code}")
        assert outcome.status == 2
        assert outcome.stdout == ""
        assert outcome.stderr.startswith("gradsan: torch is not installed")
        assert outcome.stderr.count("\n") == 1


VERSION_ERROR = (
    "RuntimeError('one of the variables needed for gradient computation has been modified by an inplace operation: "
    "[torch.FloatTensor [3]] is at version 1; expected version 0 instead.')"
)
LEAF_ERROR = "RuntimeError('a leaf Variable that requires grad is being used in an in-place operation.')"


class TestBlindSpotsWithoutADiagnosis:
    @each(
        "end",
        [
            f"raise {VERSION_ERROR}",
            f"raise {LEAF_ERROR}",
            f"raise ValueError('training failed') from {VERSION_ERROR}",
            f"import threading\ndef f():\n    raise {VERSION_ERROR}\nthreading.Thread(target=f).start()",
        ],
    )
    def test_are_reported_after_an_error_of_autograd(self, end: str, program: Path, run_with_session: Runner) -> None:
        program.write_text(f"import torch\n{end}\n")
        told = run_with_session("blind", "run", "main.py").stderr
        assert "not seen in this run:\n  - THE BLIND SPOT\n" in told
        end_of_report = "no explanation for this error" if "thread" not in end else "0 errors, 0 warnings"
        assert told.splitlines()[-1].startswith(f"gradsan: {end_of_report}; watched 7 saves")

    @pytest.mark.parametrize("end", ["pass", "raise ValueError('a fault of its own')", "exit(3)"])
    def test_are_not_reported_otherwise(self, end: str, program: Path, run_with_session: Runner) -> None:
        program.write_text(f"import torch\n{end}\n")
        assert "THE BLIND SPOT" not in run_with_session("blind", "run", "main.py").stderr

    def test_are_not_reported_when_quiet(self, program: Path, run_with_session: Runner) -> None:
        program.write_text(f"import torch\nraise {VERSION_ERROR}\n")
        assert "THE BLIND SPOT" not in run_with_session("blind", "run", "--quiet", "main.py").stderr

    @pytest.mark.parametrize("session", ["nothing", "report fails"])
    def test_nothing_unseen_or_reported_already_makes_no_report(
        self, session: str, program: Path, run_with_session: Runner
    ) -> None:
        program.write_text(f"import torch\nraise {VERSION_ERROR}\n")
        assert "not seen in this run" not in run_with_session(session, "run", "main.py").stderr

    def test_a_class_that_cannot_be_shown_changes_nothing(self, program: Path, run_with_session: Runner) -> None:
        program.write_text(
            "import torch\nclass Odd(RuntimeError):\n    def __str__(self):\n        raise KeyError\nraise Odd\n"
        )
        outcome = run_with_session("blind", "run", "main.py")
        assert outcome.status == 1
        assert "gradsan" not in outcome.stderr


class TestTerminal:
    def test_quiet(self, program: Path, run_with_session: Runner) -> None:
        outcome = run_with_session("error", "run", "--quiet", "--json", "out.json", "main.py")
        assert (outcome.stdout, outcome.stderr, outcome.status) == ("ran\n", "", 66)
        assert json.loads((program.parent / "out.json").read_text())["diagnoses"][0]["code"] == "GS101"

    def test_language_color_and_stacks_reach_the_presenter(self, program: Path, run_with_session: Runner) -> None:
        env = {"NO_COLOR": ""}
        plain = run_with_session("error", "run", "main.py", env=env).stderr
        assert "\x1b[" not in plain
        assert "\x1b[" in run_with_session("error", "run", "--color", "always", "main.py", env=env).stderr
        assert "\x1b[" in run_with_session("error", "run", "main.py", env={**env, "FORCE_COLOR": "1"}).stderr
        assert (
            "\x1b[" not in run_with_session("error", "run", "--color=never", "main.py", env={"FORCE_COLOR": "1"}).stderr
        )
        assert run_with_session("error", "run", "--lang", "zh", "main.py", env=env).stderr != plain
        assert run_with_session("error", "run", "--stacks", "main.py", env=env).stderr != plain

    def test_chinese_becomes_english_where_stderr_cannot_carry_it(
        self, program: Path, run_with_session: Runner
    ) -> None:
        words = ("error", "run", "--lang", "zh", "--html", "out.html", "main.py")
        narrow = {"PYTHONIOENCODING": "cp1252", "PYTHONUTF8": "0"}
        assert "错误[GS101]" in run_with_session(*words).stderr
        shown = run_with_session(*words, env=narrow).stderr
        assert "error[GS101]" in shown
        assert "\\u" not in shown
        assert 'lang="zh-Hans"' in (program.parent / "out.html").read_text(encoding="utf-8")

    def test_a_report_says_when_the_program_ran_and_leads_to_the_editor(
        self, program: Path, run_with_session: Runner
    ) -> None:
        settings = {"GRADSAN_OPTIONS": "editor=zed"}
        run_with_session("error", "run", "--json", "out.json", "--html", "out.html", "main.py", env=settings)
        ran = json.loads((program.parent / "out.json").read_text())["program"]
        assert datetime.fromisoformat(ran["started"]).tzinfo is not None
        assert ran["seconds"] >= 0
        page = (program.parent / "out.html").read_text(encoding="utf-8")
        assert ran["started"][:19].replace("T", " ") in page
        assert f'href="zed://file{program.as_posix()}:' in page

    def test_lines_of_code_are_found_and_forgotten(self, run_with_session: Runner) -> None:
        code = "import torch, atexit, linecache; atexit.register(lambda: print(linecache.getlines('<string>')))"
        outcome = run_with_session("error", "run", "-c", code)
        assert "import torch, atexit" in outcome.stderr

    @each(
        "sabotage",
        [
            "sys.stderr.close()",
            "sys.stderr = None",
            "sys.stderr = object()",
            "os.close(2)",
            "sys.stderr = sys.__stderr__ = io.StringIO()",
            "sys.path.clear()",
            "sys.path[:] = [1, None]",
            "warnings.simplefilter('error')",
            "open('gone', 'w').close(); os.mkdir('d'); os.chdir('d'); os.rmdir('../d')",
            "builtins.print = builtins.open = None",
            "sys.stderr = io.TextIOWrapper(sys.stderr.buffer, encoding='ascii', errors='strict')",
            "sys.setrecursionlimit(200)",
            "locale.setlocale(locale.LC_ALL, 'C')",
            "os.environ.clear()",
            "[sys.modules.pop(name) for name in list(sys.modules) if name.startswith('gradsan')]",
        ],
    )
    def test_the_report_does_not_depend_on_the_programs_end(
        self, sabotage: str, program: Path, run_python: Runner, run_with_session: Runner
    ) -> None:
        program.write_text(f"import builtins, io, locale, os, sys, warnings, torch\n{sabotage}\n")
        outcome = run_with_session("error", "run", "--json", "out.json", "main.py", kind="started")
        # python itself fails in the end where it cannot flush stderr.
        assert outcome.status == (run_python("main.py").status or 66)
        assert "Traceback" not in outcome.stderr
        assert json.loads((program.parent / "out.json").read_text())["diagnoses"]
        is_deaf = any(word in sabotage for word in ("stderr.close", "os.close", "__stderr__"))
        assert ("THE TITLE" in outcome.stderr) != is_deaf

    def test_interrupt_is_reported_and_still_ends_the_process(self, program: Path, run_with_session: Runner) -> None:
        program.write_text("import os, signal, time, torch\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(5)\n")
        outcome = run_with_session("error", "run", "--json", "out.json", "main.py")
        assert outcome.status == -2
        assert outcome.stderr.count("KeyboardInterrupt") == 1
        assert "THE TITLE" in outcome.stderr
        program_facts = json.loads((program.parent / "out.json").read_text())["program"]
        assert program_facts.pop("started")
        assert program_facts.pop("seconds") is not None
        assert program_facts == {
            "argv": ["main.py"],
            "outcome": "failed",
            "exception": {"type": "KeyboardInterrupt", "message": ""},
            "ended": True,
        }


class TestJsonFile:
    @each(
        ("end", "outcome", "exception"),
        [
            ("pass", "finished", None),
            ("exit(0)", "finished", None),
            ("exit(3)", "failed", {"type": "SystemExit", "message": "3"}),
            ("1 / 0", "failed", {"type": "ZeroDivisionError", "message": "division by zero"}),
            ("import json; json.loads('?')", "failed", None),
        ],
    )
    def test_says_how_the_program_ended(
        self, end: str, outcome: str, exception: dict[str, str] | None, program: Path, run_with_session: Runner
    ) -> None:
        program.write_text(f"import torch\n{end}\n")
        run_with_session("nothing", "run", "--json", "out.json", "main.py", "--flag")
        facts = json.loads((program.parent / "out.json").read_text())["program"]
        assert facts["argv"] == ["main.py", "--flag"]
        assert facts["outcome"] == outcome
        if "json" in end:
            assert facts["exception"]["type"] == "json.decoder.JSONDecodeError"
        else:
            assert facts["exception"] == exception

    def test_goes_where_the_program_started(self, program: Path, run_with_session: Runner) -> None:
        program.write_text("import os, torch\nos.chdir('/')\n")
        run_with_session("nothing", "run", "--json", "out.json", "main.py")
        assert (program.parent / "out.json").exists()

    def test_keeps_mode_and_link_of_the_former_file(self, program: Path, run_with_session: Runner) -> None:
        folder = program.parent
        (folder / "kept.json").write_text("former")
        (folder / "kept.json").chmod(0o640)
        (folder / "link.json").symlink_to("kept.json")
        run_with_session("nothing", "run", "--json", "link.json", "main.py")
        assert (folder / "link.json").is_symlink()
        assert json.loads((folder / "kept.json").read_text())["schema"] == "gradsan.report/1"
        assert stat.S_IMODE((folder / "kept.json").stat().st_mode) == 0o640
        assert not list(folder.glob(".*.tmp"))

    def test_former_file_stays_until_the_new_one_is_whole(self, program: Path, run_with_session: Runner) -> None:
        (program.parent / "out.json").write_text("former")
        program.write_text("import os, torch\nprint(open('out.json').read(), flush=True)\nos.kill(os.getpid(), 9)\n")
        outcome = run_with_session("error", "run", "--json", "out.json", "main.py")
        assert (outcome.stdout, outcome.status) == ("former\n", -9)
        assert (program.parent / "out.json").read_text() == "former"
        assert not list(program.parent.glob(".*.tmp"))

    def test_may_be_a_stream(self, program: Path, run_with_session: Runner) -> None:
        outcome = run_with_session("nothing", "run", "--json", "/dev/stdout", "main.py")
        assert '"schema": "gradsan.report/1"' in outcome.stdout

    def test_folder_that_the_program_removed(self, program: Path, run_with_session: Runner) -> None:
        (program.parent / "sub").mkdir()
        program.write_text("import os, torch\nos.rmdir('sub')\n")
        outcome = run_with_session("nothing", "run", "--json", "sub/out.json", "main.py")
        assert outcome.stderr == "gradsan: sub/out.json cannot be written: No such file or directory\n"
        assert outcome.status == 0


def test_the_last_line_names_the_command_that_tries_fixes(tmp_path: Path, run_warm: Runner) -> None:
    text = "import torch\na = torch.ones(2, requires_grad=True)\nb = a.sigmoid()\nb.mul_(2)\nb.sum().backward()\n"
    (tmp_path / "a train.py").write_text(text)
    outcome = run_warm("run", "--lang", "en", "a train.py", "--lr", "1")
    assert outcome.status == 1
    last = outcome.stderr.splitlines()[-1]
    assert last == "gradsan: 2 fixes can be tried without changing a file: gradsan fix 'a train.py' --lr 1"
