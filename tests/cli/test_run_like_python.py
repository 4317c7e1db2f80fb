"""A program under ``gradsan run`` and the same program under python: same stdout, stderr and status."""

from __future__ import annotations

import py_compile
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest
from side_by_side import Runner

from cases import each
from gradsan.record import log

SURROUNDINGS = """
import os, sys
import __main__
for name, value in sorted(vars(__main__).items()):
    if name.startswith("__"):
        is_plain = value is None or isinstance(value, (str, dict))
        print(name, value if is_plain else getattr(value, "__name__", type(value).__name__))
        print(getattr(value, "name", None))
print(sys.argv, sys.path, os.getcwd(), type(__builtins__), sys.modules["__main__"] is __main__)
print(sys.flags, sys.getrecursionlimit(), sys.meta_path if "torch" in sys.modules else "", sys.stdin.read())
"""

if log.native_available() and sys.version_info < (3, 14):
    SURROUNDINGS += """
import inspect, warnings
def recurse(depth):
    try:
        return recurse(depth + 1)
    except RecursionError:
        return depth
print([one.function for one in inspect.stack()], recurse(0))
try:
    print(sys._getframe(9))
except ValueError as error:
    print(error)
warnings.warn("from the outermost", stacklevel=2)
"""


def write(path: Path, source: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(source))
    return str(path)


class TestSurroundings:
    @each(
        "words",
        [
            ["main.py", "--json", "x", "-m", "y", "--", "-h"],
            ["./main.py"],
            ["sub/../main.py"],
            ["sub/link.py", "--quiet"],
            ["-m", "main", "-c", "--stacks"],
            ["-mmain", "a"],
            ["-m", "package"],
            ["-m", "package.part", "a"],
            ["-c", SURROUNDINGS, "-m", "--json"],
            ["-c" + SURROUNDINGS],
            ["folder", "a"],
            ["./folder/"],
            ["archive.zip", "a"],
            ["compiled.pyc", "a"],
        ],
        ids=lambda words: " ".join(words)[:20],
    )
    def test_main_argv_path_and_stdin(self, words: list[str], tmp_path: Path, beside_python: Runner) -> None:
        for name in ("main.py", "package/__main__.py", "package/part.py", "folder/__main__.py"):
            write(tmp_path / name, SURROUNDINGS)
        write(tmp_path / "package/__init__.py", "print('package first', __name__)")
        (tmp_path / "sub").mkdir()
        (tmp_path / "sub" / "link.py").symlink_to("../main.py")
        with zipfile.ZipFile(tmp_path / "archive.zip", "w") as archive:
            archive.writestr("__main__.py", SURROUNDINGS)
        py_compile.compile(str(tmp_path / "main.py"), cfile=str(tmp_path / "compiled.pyc"))

        plain = beside_python(*words, cwd=tmp_path, stdin="read by the program")
        assert "__main__" in plain.stdout
        assert "read by the program" in plain.stdout

    def test_script_from_stdin(self, beside_python: Runner) -> None:
        assert "__file__ <stdin>" in beside_python("-", "a", stdin=SURROUNDINGS).stdout

    @pytest.mark.parametrize("words", [["main.py"], ["folder"], ["-m", "main"]], ids=" ".join)
    @pytest.mark.skipif(sys.version_info < (3, 11), reason="-P exists since 3.11")
    def test_without_script_directory(self, words: list[str], tmp_path: Path, run_python: Runner) -> None:
        write(tmp_path / "folder/__main__.py", "import sys; print(sys.path)")
        write(tmp_path / "main.py", "import sys; print(sys.path)")
        env = {"PYTHONPATH": str(tmp_path)}
        assert run_python("-P", "-m", "gradsan", "run", *words, env=env) == run_python("-P", *words, env=env)

    def test_options_of_the_interpreter(self, tmp_path: Path, run_python: Runner) -> None:
        script = write(tmp_path / "main.py", "'''doc'''\nassert False\nprint(__doc__)\n")
        plain = run_python("-OO", script)
        assert plain.stdout == "None\n"
        assert run_python("-OO", "-m", "gradsan", "run", script) == plain

    def test_modules_that_read_main_see_the_program(self, tmp_path: Path, beside_python: Runner) -> None:
        script = write(
            tmp_path / "main.py",
            """
            import inspect, linecache, pickle, typing
            from dataclasses import dataclass
            from enum import Enum

            @dataclass
            class Node:
                next: "Node | None" = None

            class Colour(Enum):
                RED = 1

            def function(node: "Node") -> "Colour":
                return Colour.RED

            print(pickle.loads(pickle.dumps(Node(Node()))), pickle.loads(pickle.dumps(function))(None))
            print(typing.get_type_hints(function), typing.get_type_hints(Node))
            print(inspect.getsource(function), inspect.getsource(Node), inspect.getfile(Node))
            print(inspect.getmodule(function), linecache.getline(__file__, 2))
            if __name__ == "__main__":
                import __main__
                print(__main__.Node is Node)
            """,
        )
        assert "def function" in beside_python(script).stdout

    def test_main_is_imported_once_more_by_its_name(self, tmp_path: Path, beside_python: Runner) -> None:
        write(tmp_path / "twice.py", "print(__name__)\nif __name__ == '__main__':\n    import twice\n")
        assert beside_python("twice.py").stdout == "__main__\ntwice\n"
        beside_python("-m", "twice")

    def test_local_modules_named_like_those_gradsan_uses(self, tmp_path: Path, beside_python: Runner) -> None:
        for name in ("rich", "executing"):
            write(tmp_path / f"{name}.py", f"print('the local {name}')")
        assert beside_python("-c", "import rich, executing").stdout == "the local rich\nthe local executing\n"
        write(tmp_path / "main.py", "import rich, executing")
        beside_python("main.py")

    def test_report_where_local_modules_hide_libraries(self, tmp_path: Path, run_python: Runner) -> None:
        for name in ("rich", "difflib", "html"):
            write(tmp_path / f"{name}.py", f"name = {name!r}")
        fails = """
            w = torch.ones(3, requires_grad=True)
            y = w.exp()
            y.add_(1)
            try:
                y.sum().backward()
            finally:
                import rich, difflib, html
                print(rich.name, difflib.name, html.name)
            """
        write(tmp_path / "main.py", f"import torch, rich, difflib, html\n{textwrap.dedent(fails)}")
        write(tmp_path / "enabled.py", f"import gradsan\ngradsan.enable()\nimport torch\n{textwrap.dedent(fails)}")
        files = ("--html", "page.html", "--json", "out.json")
        for words in (("-m", "gradsan", "run", *files, "main.py"), ("enabled.py",)):
            ended = run_python(*words)
            assert ended.stdout == "rich difflib html\n", ended.stderr
            assert "error[GS101]" in ended.stderr
            assert "not seen" not in ended.stderr
            assert "gradsan/" not in ended.stderr
        assert "GS101" in (tmp_path / "page.html").read_text()


EXITS = [
    "3",
    "0",
    "None",
    "True",
    "-1",
    "256",
    "2**31",
    "'words on stderr'",
    "''",
    "1.5",
    "('a', 'b')",
    "__import__('enum').IntEnum('E', 'A B C').C",
]


class TestEnds:
    @each("code", EXITS)
    def test_exit_code(self, code: str, warm_beside_python: Runner) -> None:
        warm_beside_python("-c", f"import sys; print('out'); sys.exit({code})")

    def test_other_ways_out(self, tmp_path: Path, beside_python: Runner) -> None:
        assert beside_python("-c", "raise SystemExit").status == 0
        assert beside_python("-c", "class Leave(SystemExit): code = 9\nraise Leave").status == 9
        assert beside_python("-c", "import os; print('x', flush=True); os._exit(7)").status == 7
        assert beside_python("-c", "import os, signal; os.kill(os.getpid(), signal.SIGTERM)").status == -15
        assert beside_python("-c", "raise GeneratorExit").status == 1

    def test_exit_text_that_nobody_hears(self, run_gradsan: Runner) -> None:
        assert run_gradsan("run", "-c", "import sys; sys.stderr.close(); sys.exit('lost')").status == 1

    @pytest.mark.parametrize("words", [["main.py"], ["-m", "main"], ["-c", "import main"]], ids=" ".join)
    def test_keyboard_interrupt(self, words: list[str], tmp_path: Path, beside_python: Runner) -> None:
        write(
            tmp_path / "main.py",
            """
            import atexit, os, signal, time
            atexit.register(print, "at exit")
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(5)
            """,
        )
        plain = beside_python(*words)
        assert plain.status == -2
        assert "at exit" in plain.stdout

    def test_caught_or_derived_keyboard_interrupt(self, beside_python: Runner) -> None:
        raising = "import os, signal, time\ntry: os.kill(os.getpid(), signal.SIGINT); time.sleep(5)\n"
        assert beside_python("-c", raising + "except KeyboardInterrupt: print('caught')").status == 0
        assert beside_python("-c", "class Mine(KeyboardInterrupt): pass\nraise Mine").status == 1

    def test_last_words(self, tmp_path: Path, beside_python: Runner) -> None:
        script = write(
            tmp_path / "main.py",
            """
            import atexit, threading, time, weakref, concurrent.futures

            class Thing:
                def __del__(self):
                    print("deleted", __name__)

            thing, other = Thing(), Thing()
            weakref.finalize(other, print, "finalized")

            @atexit.register
            def failing():
                print("at exit", threading.main_thread().is_alive())
                raise ValueError("raised at exit")

            ready = threading.Event()

            def work():
                ready.wait()
                print("thread done")
                raise KeyError("raised in a thread")

            threading.Thread(target=work, name="worker").start()
            pool = concurrent.futures.ThreadPoolExecutor(1)
            for number in range(4):
                pool.submit(lambda n: (time.sleep(0.1), print("future", n)), number)
            pool.submit(ready.set)
            print("main done", end="", flush=True)
            """,
        )
        plain = beside_python(script)
        assert "raised at exit" in plain.stderr
        assert "raised in a thread" in plain.stderr

    def test_interrupt_while_waiting_for_threads(self, tmp_path: Path, run_python: Runner, run_gradsan: Runner) -> None:
        script = write(
            tmp_path / "main.py",
            """
            import os, signal, threading, time
            threading.Thread(target=time.sleep, args=(3,)).start()
            def interrupt():
                time.sleep(0.5)
                os.kill(os.getpid(), signal.SIGINT)
            threading.Thread(target=interrupt, daemon=True).start()
            """,
        )
        plain, watched = run_python(script), run_gradsan("run", script)
        assert (watched.stdout, watched.status) == (plain.stdout, plain.status)
        assert watched.stderr.splitlines()[-1] == plain.stderr.splitlines()[-1] == "KeyboardInterrupt: "
        assert "gradsan" not in watched.stderr

    def test_streams_that_are_closed(self, beside_python: Runner) -> None:
        beside_python("-c", "import sys; sys.stderr.close(); 1/0")
        beside_python("-c", "import sys; print('x'); sys.stdout.close()")
        beside_python("-c", "import os; os.close(2); 1/0")
        beside_python("-c", "import sys; sys.stderr = None; 1/0")
        beside_python("-c", "import os; print('lost'); os.close(1)")
        beside_python("-c", "import sys, io; sys.stderr = io.StringIO(); 1/0")

    def test_a_reader_that_leaves(self, tmp_path: Path, beside_python: Runner) -> None:
        script = write(
            tmp_path / "main.py",
            """
            import os, sys
            reader, writer = os.pipe()
            os.dup2(writer, 1)
            os.close(reader)
            print("nobody reads this")
            """,
        )
        assert beside_python(script).status == 120

    def test_deleted_working_directory(self, tmp_path: Path, beside_python: Runner) -> None:
        script = write(
            tmp_path / "main.py",
            """
            import os, shutil, tempfile
            folder = tempfile.mkdtemp()
            os.chdir(folder)
            shutil.rmtree(folder)
            try:
                os.getcwd()
            except FileNotFoundError:
                print("gone")
            1 / 0
            """,
        )
        assert beside_python(script).stdout == "gone\n"

    def test_working_directory_gone_before(self, tmp_path: Path, run_python: Runner) -> None:
        script = write(tmp_path / "main.py", "import sys; print(sys.argv, sys.path); 1/0")
        starter = write(
            tmp_path / "starter.py",
            """
            import os, shutil, subprocess, sys, tempfile
            folder = tempfile.mkdtemp()
            os.chdir(folder)
            shutil.rmtree(folder)
            sys.exit(subprocess.call([sys.executable, *sys.argv[1:]]))
            """,
        )
        plain = run_python(starter, script)
        assert run_python(starter, "-m", "gradsan", "run", script) == plain
        assert "ZeroDivisionError" in plain.stderr

    def test_fork(self, tmp_path: Path, beside_python: Runner) -> None:
        script = write(
            tmp_path / "main.py",
            """
            import os, sys
            child = os.fork()
            if child == 0:
                print("child", flush=True)
                sys.exit(5)
            print("parent", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
            if os.fork() == 0:
                raise ValueError("in the child")
            os.wait()
            """,
        )
        assert beside_python(script).stdout == "child\nparent 5\n"


FAILURES = {
    "nested": "def f(n):\n    return f(n - 1) if n else 1 / 0\nf(2)",
    "cause": "try:\n    1 / 0\nexcept ZeroDivisionError as error:\n    raise ValueError('mine') from error",
    "context": "try:\n    {}['x']\nexcept KeyError:\n    int('y')",
    "suppressed": "try:\n    1 / 0\nexcept ZeroDivisionError:\n    raise ValueError from None",
    "loop": "a, b = ValueError('a'), ValueError('b')\na.__cause__, b.__cause__ = b, a\nraise a",
    "unprintable": "class Bad(Exception):\n    def __str__(self): return 1 / 0\nraise Bad",
    "missing module": "import no_such_module_anywhere",
    "broken module": "import broken",
    "failing module": "import failing",
    "attribute": "import os\nos.getcwdd",
    "name": "lenght = 1\nprint(lenghth)",
    "assertion": "assert 1 == 2, 'words'",
    "generator": "list(1 / n for n in (1, 0))",
    "callback": "sorted([1, 2], key=lambda x: x / 0)",
    "exec": "exec(compile('1 / 0', 'made_up.py', 'exec'))",
    "hook": "import sys\nsys.excepthook = lambda *it: print('hook', it[0], it[2].tb_frame.f_code.co_name)\n1 / 0",
    "failing hook": "import sys\ndef hook(*_): raise KeyError('hook')\nsys.excepthook = hook\n1 / 0",
    "leaving hook": "import sys\nsys.excepthook = lambda *_: sys.exit(4)\n1 / 0",
    "no hook": "import sys\ndel sys.excepthook\n1 / 0",
    "last": "import sys, atexit\natexit.register(lambda: print(sys.last_type, sys.last_traceback.tb_lineno))\n1 / 0",
    "not str": "raise ValueError(b'\\xff', '\\ud800', 'é')",
}
if sys.version_info >= (3, 11):
    FAILURES["group"] = (
        "def f(n): 1 / n\nerrors = []\nfor e in (0, 'x'):\n    try: f(e)\n"
        "    except Exception as error: errors.append(error)\n"
        "raise ExceptionGroup('several', [*errors, ExceptionGroup('inner', errors)]) from errors[0]"
    )
    FAILURES["note"] = "error = ValueError('text')\nerror.add_note('a note')\nraise error"


class TestTracebacks:
    @each("source", FAILURES.values(), ids=FAILURES.keys())
    def test_as_python_prints_it(
        self, source: str, tmp_path: Path, warm_beside_python: Runner, pytestconfig: pytest.Config
    ) -> None:
        write(tmp_path / "main.py", source)
        write(tmp_path / "broken.py", "x = = 1")
        write(tmp_path / "failing.py", "def g(): 1 / 0\ng()")
        plain = warm_beside_python("main.py", cwd=tmp_path)
        assert plain.status != 0
        if pytestconfig.getoption("--long"):
            warm_beside_python("-m", "main", cwd=tmp_path)

    @each(
        "words",
        [["-c", "def f():\n    1 / 0\nf()"], ["folder"], ["archive.zip"], ["-m", "package"], ["-"]],
        ids=" ".join,
    )
    def test_other_kinds_of_program(self, words: list[str], tmp_path: Path, warm_beside_python: Runner) -> None:
        failing = "def f():\n    1 / 0\nf()\n"
        write(tmp_path / "folder/__main__.py", failing)
        write(tmp_path / "package/__init__.py", failing)
        with zipfile.ZipFile(tmp_path / "archive.zip", "w") as archive:
            archive.writestr("__main__.py", failing)
        assert "ZeroDivisionError" in warm_beside_python(*words, cwd=tmp_path, stdin=failing).stderr

    @each("words", [["-m", "nothing"], ["-m", "folder"], ["-m", "a/b.py"], ["-m", "json"]], ids=" ".join)
    def test_modules_that_cannot_run(self, words: list[str], tmp_path: Path, warm_beside_python: Runner) -> None:
        write(tmp_path / "folder/x.py", "")
        plain = warm_beside_python(*words, cwd=tmp_path)
        assert (plain.status, plain.stderr.count("\n")) == (1, 1)

    @each(
        "source",
        [
            "x = (\n",
            "def f():\nx\n",
            "if 1:\n\tx\n        y\n",
            "return\n",
            "x = 1\n'''abc\n",
            "foo(a, b for b in c)\n",
            "x = f'{a b}'\n",
            "é = 1 2",
            "x = 1\r\ny = = 2\r\n",
            "# coding: latin-1\nx = = 1\n",
            "from __future__ import nothing\n",
            "nonlocal x\n",
            "",
        ],
    )
    def test_syntax_error(
        self, source: str, tmp_path: Path, warm_beside_python: Runner, pytestconfig: pytest.Config
    ) -> None:
        (tmp_path / "main.py").write_text(source, encoding="utf-8")
        assert warm_beside_python("main.py", cwd=tmp_path).status == (1 if source else 0)
        if source == "x = (\n" or pytestconfig.getoption("--long"):
            warm_beside_python("-m", "main", cwd=tmp_path)
            warm_beside_python("-c", source, cwd=tmp_path)

    def test_text_in_no_encoding(self, tmp_path: Path, run_gradsan: Runner) -> None:
        for content in (b"x = '\xe9'\n", b"# coding: no-such\n", b"\xef\xbb\xbf# coding: latin-1\n"):
            (tmp_path / "main.py").write_bytes(content)
            watched = run_gradsan("run", "main.py")
            assert watched.status == 1
            assert watched.stderr.splitlines()[-1].startswith("SyntaxError: ")
            assert "Traceback" not in watched.stderr

    def test_future_statements_of_gradsan_do_not_leak(self, beside_python: Runner) -> None:
        beside_python("-c", "def f(x: undefined_name): pass")
        assert beside_python("-c", "def f(x: 1 + 1): pass\nprint(f.__annotations__)").stdout == "{'x': 2}\n"


class TestWarnings:
    @pytest.mark.parametrize("env", [{}, {"PYTHONWARNINGS": "error"}, {"PYTHONDEVMODE": "1"}], ids=str)
    def test_filters(self, env: dict[str, str], tmp_path: Path, beside_python: Runner) -> None:
        script = write(
            tmp_path / "main.py",
            r"""
            import warnings
            print(len(warnings.filters))
            for kind in (UserWarning, DeprecationWarning, PendingDeprecationWarning):
                for _ in range(2):
                    try:
                        warnings.warn(kind.__name__, kind)
                    except Warning as warning:
                        print("raised", warning)
            def old():
                warnings.warn("old", DeprecationWarning, stacklevel=2)
            try:
                old()
            except Warning as warning:
                print("raised", warning)
            """,
        )
        beside_python(script, env=env)

    def test_warning_of_the_compiler(self, tmp_path: Path, beside_python: Runner) -> None:
        script = write(tmp_path / "main.py", "x = 1\nassert (x, 'always true')\n")
        plain = beside_python(script)
        assert plain.stderr.count("SyntaxWarning") == 1
