"""Patches on disk: all or nothing."""

import stat
import subprocess

import pytest

from gradsan.repair.patch import Patch, apply_patch, dirty_files


@pytest.fixture
def files(tmp_path):
    for name in ("a.py", "b.py"):
        (tmp_path / name).write_text("x = 1\n")
    return tmp_path


def new(files):
    return Patch({str(files / name): b"x = 2\n" for name in ("a.py", "b.py")})


def test_every_file_is_written_and_keeps_its_mode(files):
    (files / "a.py").chmod(0o750)
    with apply_patch(new(files)):
        assert (files / "a.py").read_text() == "x = 2\n"
    assert (files / "b.py").read_text() == "x = 2\n"
    assert stat.S_IMODE((files / "a.py").stat().st_mode) == 0o750
    assert sorted(one.name for one in files.iterdir()) == ["a.py", "b.py"]


def test_a_failure_puts_everything_back(files):
    with pytest.raises(KeyError), apply_patch(new(files)):
        raise KeyError
    assert (files / "a.py").read_text() == (files / "b.py").read_text() == "x = 1\n"


def test_a_link_stays_a_link(files):
    (files / "c.py").symlink_to("a.py")
    with apply_patch(Patch({str(files / "c.py"): b"x = 3\n"})):
        pass
    assert (files / "c.py").is_symlink()
    assert (files / "a.py").read_text() == "x = 3\n"


def test_git_knows_what_is_dirty(files):
    def git(*words):
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b.c", *words], cwd=files, check=True)

    assert dirty_files(new(files)) == ()
    git("init", "-q")
    git("add", "a.py")
    git("commit", "-qm", "a")
    assert dirty_files(new(files)) == ()
    (files / "a.py").write_text("x = 5\n")
    assert dirty_files(new(files)) == (str(files / "a.py"),)
