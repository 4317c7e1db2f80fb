"""``gradsan mcp``, driven by the client of the SDK."""

import json
import os

import pytest

from forked import warm_python
from gradsan.cli.mcp import MOST_CHARACTERS, bounded, fitting

PROGRAM = """\
import torch
w = torch.ones(3, requires_grad=True)
h = torch.exp(w)
h += 1
h.sum().backward()
"""


def test_an_agent_runs_explains_and_shows(tmp_path):
    # It takes a second to import: none of it where another worker runs this test.
    mcp, anyio = pytest.importorskip("mcp"), pytest.importorskip("anyio")
    if not hasattr(mcp, "Client"):
        pytest.skip("the client of mcp 2")
    (tmp_path / "train.py").write_text(PROGRAM, encoding="utf-8")

    async def talk():
        python, warm = warm_python()
        env = {**os.environ, **warm}
        server = mcp.StdioServerParameters(command=python, args=["-m", "gradsan", "mcp"], cwd=str(tmp_path), env=env)
        async with mcp.Client(server) as client:
            tools = {tool.name for tool in (await client.list_tools()).tools}

            async def call(name, **arguments):
                answer = await client.call_tool(name, arguments)
                return "".join(part.text for part in answer.content)

            ran = json.loads(await call("run_program", command=["train.py"], directory=str(tmp_path)))
            told = await call("explain", code_or_message="Trying to backward through the graph a second time")
            page = await call("explain", code_or_message="GS101")
            fixed = await call("fix_program", command=["train.py"], directory=str(tmp_path), steps=2)
            file = tmp_path / "report.json"
            file.write_text(json.dumps(json.loads(fixed)["report"]), encoding="utf-8")
            shown = await call("show_report", file=str(file))
            missing = await call("show_report", file="no such file")
        return tools, ran, told, page, fixed, shown, missing

    tools, ran, told, page, fixed, shown, missing = anyio.run(talk)
    assert tools == {"run_program", "fix_program", "explain", "show_report"}
    assert ran["exit_status"] == 1
    assert [one["code"] for one in ran["report"]["diagnoses"]] == ["GS101"]
    assert ran["report"]["next"] == ["gradsan explain GS101", "gradsan fix train.py"]
    assert told.split()[0] == "GS401"
    assert page.startswith("# GS101")
    [diagnosis] = json.loads(fixed)["report"]["diagnoses"]
    best = diagnosis["fixes"][0]
    assert (best["verification"]["status"], best["meaning"]) == ("passed", "preserved")
    assert "+h = h + 1" in best["diff"]
    assert (tmp_path / "train.py").read_text(encoding="utf-8") == PROGRAM
    assert shown.startswith("error[GS101]")
    assert "no such file" in missing
    assert max(map(len, (fixed, shown, told, page))) <= MOST_CHARACTERS


def test_answers_are_bounded():
    assert bounded("x" * 10) == "x" * 10
    assert len(bounded("x" * 1_000_000)) <= MOST_CHARACTERS


def test_json_that_is_too_long_stays_json():
    finding = {"code": "GS101", "fixes": [{"summary": "x" * 400}] * 6}
    report = {"diagnoses": [{**finding, "fixes": list(finding["fixes"])} for _ in range(20)]}
    text = fitting({"exit_status": 1, "report": report, "output": "y" * 2000})
    assert len(text) <= MOST_CHARACTERS
    short = json.loads(text)
    kept = short["report"]["diagnoses"]
    assert len(kept) + short["left_out"]["diagnoses"] == 20
    assert kept[0]["fixes"], "a finding keeps its best fixes"
    assert json.loads(fitting({"exit_status": 0, "report": None, "output": ""})) == {
        "exit_status": 0,
        "report": None,
        "output": "",
    }
