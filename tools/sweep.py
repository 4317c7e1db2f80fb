"""Trainings of every small model of a public library, plain and under gradsan, compared bit for bit.

    python tools/sweep.py transformers --out sweep.jsonl
    python tools/sweep.py timm --out sweep.jsonl --only 'timm:resnet*'

Each model trains two steps in a process of its own (a fork): plain, plain again (a training that is not repeatable is
left out), in each of ``--modes``, and plain once more after gradsan was switched off. The outcome is losses, gradients,
parameters, buffers and random state, or the error. ``--out`` gets a line of JSON for each model, and a further call
with the same file goes on where the last one ended. The exit status is 1 where a mode differed, or found an error or
a warning.
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import json
import os
import random
import signal
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import torch
import zoo
from rich.progress import Progress

import gradsan

_SEED = 20_260_101


def train(entry: zoo.Entry, steps: int, device: str) -> dict[str, Any]:
    """Train a model anew and say what became of it: a digest by name, and the losses."""
    torch.manual_seed(_SEED)
    random.seed(_SEED)
    numpy.random.seed(_SEED)  # what masks sounds draws from it
    with torch.device(device):
        model, loss_of = entry.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    outcome: dict[str, Any] = {}
    try:
        for step in range(steps):
            optimizer.zero_grad()
            loss = loss_of(model)
            loss.backward()
            outcome[f"loss {step}"] = loss.item().hex()
            for name, parameter in model.named_parameters():
                outcome[f"gradient {step} {name}"] = _digest(parameter.grad)
            optimizer.step()
    except zoo.CannotBuildError:
        raise
    except Exception as error:  # an outcome like any other, which must be the same in every mode
        outcome["error"] = f"{type(error).__name__}: {error}"
    for name, value in model.state_dict().items():
        outcome[f"state {name}"] = _digest(value)
    outcome["random state"] = _digest(torch.get_rng_state())
    if device != "cpu":
        outcome["random state of the device"] = _digest(torch.get_device_module(device).get_rng_state())
    return outcome


def _digest(value: object) -> str:
    if not isinstance(value, torch.Tensor):
        return repr(value)
    # Anew, as one element is contiguous in any stride.
    flat = torch.empty(value.numel(), dtype=value.dtype, device="cpu").copy_(value.detach().reshape(-1))
    raw = flat.view(torch.uint8).numpy().tobytes() if value.numel() else b""
    return hashlib.blake2b(raw, digest_size=8).hexdigest()


def compare(entry: zoo.Entry, modes: Sequence[str], steps: int, device: str) -> dict[str, Any]:
    """What the modes made of one model, as a row of the output."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    row: dict[str, Any] = {"model": entry.name}
    try:
        plain = train(entry, steps, device)
    except Exception as error:
        return {**row, "status": "not built", "why": f"{type(error).__name__}: {error}"[:300]}
    if "error" in plain:
        return {**row, "status": "not built", "why": plain["error"][:300]}
    if train(entry, steps, device) != plain:
        return {**row, "status": "not repeatable"}
    for mode in modes:
        with gradsan.watch(mode) as watched:  # type: ignore[arg-type]
            outcome = train(entry, steps, device)
        row[mode] = {"differs": _differences(plain, outcome), "found": [str(one) for one in _found(watched)]}
    row["after"] = {"differs": _differences(plain, train(entry, steps, device)), "found": []}
    outcomes = [row[mode] for mode in (*modes, "after")]
    if any(one["differs"] for one in outcomes):
        return {**row, "status": "differs"}
    # Notes are counted at the end; whether they are true is for a reader to say.
    return {**row, "status": "alarm" if any(_is_alarm(found) for one in outcomes for found in one["found"]) else "same"}


def _differences(plain: dict[str, Any], other: dict[str, Any]) -> list[str]:
    differ = [name for name in {**plain, **other} if plain.get(name) != other.get(name)]
    return [f"{name}: {other.get(name)}"[:300] for name in differ[:5]]


def _is_alarm(found: str) -> bool:
    return " note " not in found


def _found(watched: gradsan.watch) -> list[str]:
    return [f"{one.code} {one.severity} {one.tensor.name if one.tensor else ''}" for one in watched.diagnoses] + [
        f"blind spot: {spot}" for spot in watched.report.seen.blind_spots if "failed" in str(spot)
    ]


def in_a_fork(work: Callable[[], dict[str, Any]], name: str, seconds: int) -> dict[str, Any]:
    """The row that ``work`` makes in a forked process; a row that says so where it dies or takes too long."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.close(reader)
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        signal.alarm(seconds)
        with os.fdopen(writer, "w") as out:
            json.dump(work(), out)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answer:
        text = answer.read()
    _, status = os.waitpid(child, 0)
    if status:
        ended = f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"status {os.WEXITSTATUS(status)}"
        return {"model": name, "status": "took too long" if ended == f"signal {signal.SIGALRM:d}" else "died: " + ended}
    return dict(json.loads(text))


def main(argv: Sequence[str] | None = None) -> int:
    """Sweep, with a bar, and sum up."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library", nargs="+", help="transformers, timm, torchvision")
    parser.add_argument("--only", default="*", help="a pattern of model names, such as 'transformers:Bert*'")
    parser.add_argument("--modes", nargs="+", default=["watch", "deep", "heal"])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--seconds", type=int, default=120, help="limit of one model")
    parser.add_argument("--sample", type=int, help="so many models only, chosen by a seed; more keep those of fewer")
    parser.add_argument("--device", default="cpu", help="default device while a model and its inputs are built")
    parser.add_argument("--part", default="1/1", metavar="K/N", help="every N-th model from the K-th on")
    options = parser.parse_args(argv)
    part, parts = map(int, options.part.split("/"))
    torch.set_num_threads(1)
    rows = [json.loads(line) for line in options.out.read_text().splitlines()] if options.out.exists() else []
    known = {row["model"] for row in rows}
    models = [entry for library in options.library for entry in zoo.entries(library)]
    wanted = [entry for entry in models if fnmatch.fnmatch(entry.name, options.only)]
    if options.sample is not None:
        random.Random(_SEED).shuffle(wanted)
        wanted = wanted[: options.sample]
    wanted = wanted[part - 1 :: parts]
    with options.out.open("a") as out, Progress() as progress:
        for entry in progress.track(wanted, description="models"):
            if entry.name in known:
                continue
            work = partial(compare, entry, options.modes, options.steps, options.device)
            row = in_a_fork(work, entry.name, options.seconds)
            rows.append(row)
            out.write(json.dumps(row) + "\n")
            out.flush()
            if _is_bad(row):
                progress.console.print(json.dumps(row, indent=1), markup=False)
    swept = [row for row in rows if row["model"] in {entry.name for entry in wanted}]
    for status, count in Counter(row["status"] for row in swept).most_common():
        print(f"{status}: {count}")
    notes = Counter(found.split()[0] for row in swept for found in row.get("watch", {}).get("found", []))
    print("models with a note, by code:", dict(notes))
    return int(any(_is_bad(row) for row in swept))


def _is_bad(row: dict[str, Any]) -> bool:
    return row["status"] in {"differs", "alarm"} or row["status"].startswith("died")


if __name__ == "__main__":
    sys.exit(main())
