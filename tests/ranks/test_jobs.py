"""``gradsan run`` under torchrun: the files of each rank, the rank that reports, and the end of a job."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

from job import OPENING, run_pair

RIGHT = """
weight = torch.ones(3, requires_grad=True)
weight.exp().sum().backward()
dist.all_reduce(weight.grad)
"""
FAILING = """
weight = torch.ones(3, requires_grad=True)
curve = weight.exp()
curve += 1
curve.sum().backward()
"""
SILENT = """
weight = torch.ones(3, requires_grad=True)
curve = weight.exp()
curve.data.add_(1)
curve.sum().backward()
"""


def test_a_right_job_says_nothing_and_leaves_pipes_alone(run_warm, tmp_path: Path):
    job = run_warm(RIGHT, "--sarif", "/dev/stdout")
    assert job.status == 0, job.stderr
    assert "gradsan" not in job.stderr
    assert (job.codes(0), job.codes(1)) == ([], [])
    assert job.stdout.count('"version": "2.1.0"') == 2
    assert not list(tmp_path.glob("stdout*"))


def test_a_failure_of_all_is_reported_once_written_by_each_and_merged(run, tmp_path: Path):
    command = Path(sys.executable).with_name("gradsan")
    started = ("--no-python", str(command)) if command.exists() else ("-m", "gradsan")
    job = run(FAILING, "--html", "out.html", torchrun=started)
    assert job.status == 1
    assert job.stderr.count("error[GS101]") == 1
    assert "gradsan: rank 0 of 2 reports" in job.stderr
    assert "gradsan report out.rank*.json" in job.stderr
    assert (job.codes(0), job.codes(1)) == (["GS101"], ["GS101"])
    assert len(list(tmp_path.glob("out.rank?.*.html"))) == 2
    assert not (tmp_path / "out.json").exists()
    files = sorted(str(file) for file in tmp_path.glob("out.rank*.json"))
    words = [sys.executable, "-m", "gradsan", "report", *files]
    merged = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    assert merged.count("error[GS101]") == 1
    assert "(2 times)" in merged
    assert "2 of 2 reports have this" in merged


def test_a_failure_of_one_rank_ends_the_others_and_is_reported_by_it(run_warm):
    job = run_warm(
        """
        if rank == 1:
            weight = torch.ones(3, requires_grad=True)
            curve = weight.exp()
            curve += 1
            curve.sum().backward()
        dist.all_reduce(torch.ones(1))  # rank 0 waits for rank 1, which never comes
        """
    )
    assert job.status == 1
    assert job.seconds < 60
    assert job.stderr.count("error[GS101]") == 1
    assert "gradsan: rank 1 of 2 reports" in job.stderr
    assert job.codes(1) == ["GS101"]


def test_without_torchrun_a_failure_of_one_rank_ends_the_other(tmp_path: Path):
    """gloo tells the other that it is alone; there is nobody who keeps a store, so each speaks for itself."""
    program = f"{OPENING}if rank == 1:\n{textwrap.indent(FAILING.strip(), '    ')}\ndist.all_reduce(torch.ones(1))\n"
    (tmp_path / "main.py").write_text(program, encoding="utf-8")
    waiting, failing = run_pair(tmp_path, "-m", "gradsan", "run", "--json", "out.json", "main.py", timeout=90)
    assert (waiting.returncode, failing.returncode) == (1, 1)
    assert "error[GS" not in waiting.stderr
    assert "error[GS101]" in failing.stderr
    assert len(list(tmp_path.glob("out.rank*.json"))) == 2


def test_a_finding_that_rank_0_did_not_have_is_reported_by_the_rank_that_had_it(run_warm):
    """Both have one finding in common, and each one of its own; one status would end the other rank, so it waits."""
    job = run_warm(
        """
        def spoiled(change):
            curve = torch.ones(3, requires_grad=True).exp()
            change(curve.data)
            curve.sum().backward()

        spoiled(lambda data: data.add_(1))
        if rank == 0:
            spoiled(lambda data: data.sub_(1))
        else:
            spoiled(lambda data: data.mul_(2))
        """,
        "--exit-code",
        "0",
    )
    assert job.status == 0, "as --exit-code says"
    assert "gradsan: rank 0 of 2 reports" in job.stderr
    assert "gradsan: rank 1 of 2 reports" in job.stderr
    assert job.stderr.count("error[GS202]") == 3
    assert (job.codes(0), job.codes(1)) == (["GS202"] * 2, ["GS202"] * 2)


def test_a_finding_lets_every_rank_end_its_work(run_warm, tmp_path: Path):
    """A status of 66 ends the other ranks: it may only come when they have ended."""
    body = f"""{SILENT}
dist.destroy_process_group()
if rank == 0:
    time.sleep(4)  # longer than rank 1 takes for its report
    open("saved", "w").close()
sys.exit()
"""
    job = run_warm(body)
    assert (tmp_path / "saved").exists()
    assert job.status == 1, "torchrun's, where a rank has failed"
    assert "exitcode  : 66" in job.stderr
    assert (job.codes(0), job.codes(1)) == (["GS202"], ["GS202"])


def test_a_finding_does_not_start_the_job_anew(run_warm, tmp_path: Path):
    body = f"open(f'began{{rank}}-{{time.time()}}', 'w').close()\n{SILENT}"
    job = run_warm(body, torchrun=("--max-restarts", "2", "-m", "gradsan"))
    assert len(list(tmp_path.glob("began*"))) == 2
    assert job.status == 0


def test_a_rank_that_is_ended_by_torchrun_ends(run):
    """The default of SIGTERM holds while the program runs."""
    job = run("if rank == 1:\n    sys.exit(3)\nwhile True:\n    time.sleep(0.1)\n")
    assert job.status == 1
    assert job.seconds < 40
    assert "exitcode  : 3" in job.stderr
