"""``gradsan mcp``, driven by the client of the SDK."""

import json
import sys

import pytest

mcp = pytest.importorskip("mcp")
if not hasattr(mcp, "Client"):
    pytest.skip("the client of mcp 2", allow_module_level=True)
anyio = pytest.importorskip("anyio")

from gradsan.cli.mcp import MOST_CHARACTERS, bounded  # noqa: E402

PROGRAM = """\
import torch
w = torch.ones(3, requires_grad=True)
h = torch.exp(w)
h += 1
h.sum().backward()
"""


def test_an_agent_runs_explains_and_shows(tmp_path):
    (tmp_path / "train.py").write_text(PROGRAM, encoding="utf-8")

    async def talk():
        server = mcp.StdioServerParameters(command=sys.executable, args=["-m", "gradsan", "mcp"], cwd=str(tmp_path))
        async with mcp.Client(server) as client:
            tools = {tool.name for tool in (await client.list_tools()).tools}

            async def call(name, **arguments):
                answer = await client.call_tool(name, arguments)
                return "".join(part.text for part in answer.content)

            ran = json.loads(await call("run_program", command=["train.py"], directory=str(tmp_path)))
            told = await call("explain", code_or_message="Trying to backward through the graph a second time")
            page = await call("explain", code_or_message="GS101")
        return tools, ran, told, page

    tools, ran, told, page = anyio.run(talk)
    assert tools == {"run_program", "fix_program", "explain", "show_report"}
    assert ran["exit_status"] == 1
    assert [one["code"] for one in ran["report"]["diagnoses"]] == ["GS101"]
    assert ran["report"]["next"] == ["gradsan explain GS101", "gradsan fix train.py"]
    assert told.split()[0] == "GS401"
    assert page.startswith("# GS101")


def test_answers_are_bounded():
    assert bounded("x" * 10) == "x" * 10
    assert len(bounded("x" * 1_000_000)) <= MOST_CHARACTERS
