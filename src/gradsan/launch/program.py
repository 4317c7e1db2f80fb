"""Program run in this process as ``python`` itself would run it.

The facts come from ``Modules/main.c`` and ``Python/pythonrun.c`` of CPython 3.10 to 3.13 (``pymain_run_python`` and
what it calls) and were compared with their behaviour. What remains different: gradsan's own frames lie below the
program's (``inspect.stack()`` ends with them, a warning whose ``stacklevel`` points beyond the program names them), the
modules gradsan needs are in ``sys.modules`` already, ``sys.orig_argv`` is that of gradsan, and a script that is no text
in its own encoding gets the SyntaxError that importing it gives.
"""

from __future__ import annotations

import contextlib
import linecache
import os
import pkgutil
import runpy
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.machinery import BuiltinImporter, PathFinder, SourceFileLoader, SourcelessFileLoader
from types import CodeType, ModuleType
from typing import Any, Literal

from gradsan.launch.uncaught import exit_status, show_uncaught
from gradsan.model import Message
from gradsan.options import OptionsError

CODE_NAME = "<string>"
"""The file name that python gives to ``-c`` code."""

_STDIN_NAME = "<stdin>"


@dataclass(frozen=True, slots=True)
class Target:
    """A program to run, and its arguments.

    ``name`` is the path of a script (or of a directory or zip file with a ``__main__``; ``-`` for stdin), the dotted
    name of a module, or code.
    """

    kind: Literal["script", "module", "code"]
    name: str
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Launch:
    """A checked Target: ``start`` runs it in the module that is to be its ``__main__``.

    ``argv`` and ``path_entry`` become ``sys.argv`` and ``sys.path[0]``; ``path_entry`` is None where there
    is none; ``is_container`` says that the entry itself is run, so that it is set even under ``-P``; ``variables``
    are those of ``__main__`` before it starts.
    """

    start: Callable[[ModuleType], None]
    argv: tuple[str, ...]
    path_entry: str | None
    is_container: bool = False
    variables: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Ending:
    """End of a program, with the exit status that python would give it.

    ``exception`` is (type name, text) if it failed; ``interrupt`` the KeyboardInterrupt by which a process dies of
    SIGINT.
    """

    status: int
    exception: tuple[str, str] | None = None
    interrupt: KeyboardInterrupt | None = None


def prepare(target: Target) -> Launch:
    """Check ``target`` without running any of it.

    Raises:
        OptionsError: for a script that does not exist, cannot be read, or is a directory without ``__main__``.
    """
    if target.kind == "module":
        return _module_launch(target)
    if target.kind == "code":
        return _code_launch(target)
    return _stdin_launch(target) if target.name == "-" else _script_launch(target)


def take_stage(launch: Launch) -> ModuleType:
    """Set the program's ``__main__`` (which is returned), ``sys.argv`` and ``sys.path`` in this process."""
    if _has_path_entry():
        del sys.path[0]
    if launch.path_entry is not None and (launch.is_container or not _is_path_safe()):
        sys.path.insert(0, launch.path_entry)
    sys.argv[:] = launch.argv

    main = ModuleType("__main__")
    if "__annotations__" in vars(sys.modules["__main__"]):
        # Interpreters that give every __main__ an empty dictionary gave one to gradsan's __main__, too.
        main.__annotations__ = {}
    main.__builtins__ = sys.modules["builtins"]  # type: ignore[attr-defined]
    vars(main).update({"__loader__": BuiltinImporter, **launch.variables})
    sys.modules["__main__"] = main
    return main


def perform(launch: Launch, main: ModuleType) -> Ending:
    """Run the program to its end. Its exception is shown as by python, and returned in the Ending."""
    failure = _raised_by(launch, main)
    if failure is None:
        return Ending(0)
    if isinstance(failure, SystemExit):
        status = exit_status(failure)
        return Ending(status, _described(failure) if status else None)
    status = show_uncaught(failure)
    # CPython checks for exactly this class.
    return Ending(status, _described(failure), failure if type(failure) is KeyboardInterrupt else None)


def gradsan_path() -> list[str]:
    """Return the ``sys.path`` of gradsan's imports: without the directory of the script that started it."""
    return sys.path[1:] if _has_path_entry() else list(sys.path)


def _raised_by(launch: Launch, main: ModuleType) -> BaseException | None:
    # Exceptions are shown outside of the except clause: there, they would become the context of later failures.
    try:
        launch.start(main)
    except BaseException as failure:
        return failure
    return None


def _script_launch(target: Target) -> Launch:
    path = _absolute(target.name)
    argv = (target.name, *target.arguments)
    if pkgutil.get_importer(path) is not None:
        if PathFinder.find_spec("__main__", [path]) is None:
            raise OptionsError(Message("cli.no_main", {"path": target.name}))
        return Launch(_run_container, argv, path, is_container=True)
    try:
        with open(path, "rb") as stream:  # noqa: PTH123 (a Path would rewrite what the user typed: ./a.py, a//b.py)
            source = stream.read()
    except (OSError, ValueError) as failure:
        reason = getattr(failure, "strerror", None) or str(failure)
        raise OptionsError(Message("cli.unreadable_script", {"path": target.name, "reason": reason})) from None

    is_compiled = path.endswith(".pyc")
    loader = (SourcelessFileLoader if is_compiled else SourceFileLoader)("__main__", path)

    def start(main: ModuleType) -> None:
        code = loader.get_code("__main__") if is_compiled else _compiled(source, path)
        assert code is not None
        _alone(exec, code, vars(main))

    entry = os.path.dirname(os.path.realpath(path))  # noqa: PTH120
    return Launch(start, argv, entry, variables={"__file__": path, "__cached__": None, "__loader__": loader})


def _stdin_launch(target: Target) -> Launch:
    def start(main: ModuleType) -> None:
        _alone(exec, _compiled(sys.stdin.buffer.read(), _STDIN_NAME), vars(main))

    variables = {"__file__": _STDIN_NAME, "__cached__": None}
    return Launch(start, ("-", *target.arguments), "", variables=variables)


def _code_launch(target: Target) -> Launch:
    source = textwrap.dedent(target.name) if sys.version_info >= (3, 14) else target.name

    def start(main: ModuleType) -> None:
        code = _compiled(source + "\n", CODE_NAME)
        _remember_source(code, source)
        _alone(exec, code, vars(main))

    return Launch(start, ("-c", *target.arguments), "")


def _module_launch(target: Target) -> Launch:
    def start(main: ModuleType) -> None:
        # The function that `python -m` itself calls, so that frames and messages are python's.
        _alone(runpy._run_module_as_main, target.name)  # type: ignore[attr-defined]

    return Launch(start, ("-m", *target.arguments), _working_directory())


def _run_container(main: ModuleType) -> None:
    # The function that python calls for a directory or a zip file.
    _alone(runpy._run_module_as_main, "__main__", False)  # type: ignore[attr-defined]


def _alone(function: Callable[..., Any], *args: Any) -> None:
    """Call a function with no frame of gradsan's below: the outermost frame of a program is its own."""
    call: Callable[..., Any] | None = None
    with contextlib.suppress(ImportError):
        from gradsan.record._native import call_alone as call
    if call is None:
        function(*args)
    else:
        call(function, *args)


def _compiled(source: bytes | str, name: str) -> CodeType:
    return compile(source, name, "exec", dont_inherit=True)


def _remember_source(code: CodeType, source: str) -> None:
    # Since 3.13 python keeps the text of -c code, so that tracebacks and inspect can show it.
    register = getattr(linecache, "_register_code", None)
    if sys.version_info >= (3, 13) and register is not None:
        register(code if hasattr(linecache, "_interactive_cache") else CODE_NAME, source, CODE_NAME)


def _has_path_entry() -> bool:
    # `python -m gradsan` in a directory that has been deleted is the one start that puts nothing in front.
    is_module = getattr(sys.modules["__main__"], "__spec__", None) is not None
    return not _is_path_safe() and not (is_module and _working_directory() is None)


def _is_path_safe() -> bool:
    # -P and -I: python puts no directory of a script in front.
    return bool(getattr(sys.flags, "safe_path", sys.flags.isolated))


def _absolute(path: str) -> str:
    # python joins without tidying: __file__ of ./a.py ends with /./a.py.
    directory = _working_directory()
    return path if directory is None else os.path.join(directory, path)  # noqa: PTH118


def _working_directory() -> str | None:
    try:
        return os.getcwd()  # noqa: PTH109
    except OSError:
        return None


def _described(failure: BaseException) -> tuple[str, str]:
    try:
        text = str(failure)
    except Exception:
        text = ""
    kind = type(failure)
    is_builtin = kind.__module__ in ("builtins", "__main__")
    return (kind.__qualname__ if is_builtin else f"{kind.__module__}.{kind.__qualname__}", text)
