"""Sweep over PyTorch's own samples of every operator and module: plain, watched, deep, healed; every bit compared.

Usage: ``python tools/op_sweep.py PROGRESS.jsonl [--only PATTERN] [--part K/N] [--threads 1 4] [--dtypes …]``. Every
operator of ``op_db`` and every module of ``module_db`` is run in a process of its own, forked from one that has torch
loaded; one line of JSON tells what differed. What ``PROGRESS.jsonl`` knows already is left out, so a sweep can be
stopped and taken up again; ``--show`` only prints what it tells. Exit status 1 where anything differed. ``--at-most``
takes a seeded few of the samples of each dtype, and ``--limit`` is for one dtype: pooling alone has 2,880 samples.
``--device cuda`` takes the samples of a device; there one process runs them all, as a fork of one that uses the device
cannot use it, so several ``--part`` side by side are for several cores.

A run is the forward, the gradients, the gradients with a graph, and the gradients of those. A mode differs where it
raises something else than the plain run, computes another bit, or reports anything: these samples overwrite nothing
that backward needs. Two plain runs tell first what is repeatable at all. A sample whose bits differ is run once more in
both ways; where any of these runs agree it is not repeatable, as some kernels are not that run in several threads.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import multiprocessing
import os
import random
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

import gradsan

MODES = ("watch", "deep", "heal")
DTYPES = ("float32", "float64", "complex64", "complex128", "bfloat16", "float16")
_SEED = 20
_REPORTED = 300
Run = Callable[[], list[Any]]


def targets() -> list[str]:
    """The names of all that can be swept, ``op:…`` and ``module:…``."""
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.testing._internal.common_modules import module_db

    operators = [f"op:{one.full_name}" for one in op_db]
    return operators + [f"module:{one.name}" for one in module_db]


def sweep(
    target: str,
    dtypes: Sequence[str] = DTYPES,
    threads: Sequence[int] = (1,),
    modes: Sequence[str] = MODES,
    at_most: int | None = None,
    device: str = "cpu",
    after_each: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """What differs in one operator or module; ``at_most`` bounds the samples of each dtype, chosen by a seed.

    ``after_each`` gets what is known after each dtype.

    Gives ``{"target": …, "runs": samples, "unrepeatable": …, "different": [[mode, dtype, sample, what], …]}``.
    """
    warnings.simplefilter("ignore")
    told: dict[str, Any] = {"target": target, "runs": 0, "unrepeatable": 0, "different": []}
    for count in threads:
        torch.set_num_threads(count)
        for dtype in dtypes:
            try:
                samples = _samples(target, dtype, device)
            except Exception as error:  # a sample that this build of torch cannot make
                told.setdefault("not_made", []).append([dtype, _short(error)])
                continue
            chosen = _chosen(len(samples), at_most)
            _compare(told, _Samples(target, dtype, device, samples), chosen, modes, f"{dtype}, {count} threads")
            if after_each is not None:
                after_each(told)
    return told


def _chosen(count: int, at_most: int | None) -> list[int]:
    if at_most is None or count <= at_most:
        return list(range(count))
    return sorted(random.Random(_SEED).sample(range(count), at_most))


class _Samples:
    """The samples of one operator or module, made once where running them changes nothing that another run reads."""

    def __init__(self, target: str, dtype: str, device: str, samples: list[Run]) -> None:
        self._made_of = (target, dtype, device)
        self._samples = samples
        self.anew = target.startswith("module:")  # a module's buffers change

    def all(self) -> list[Run]:
        return _samples(*self._made_of) if self.anew else self._samples

    def outcomes(self, chosen: list[int]) -> dict[int, tuple[str, Any]]:
        samples = self.all()
        return {number: _in_bits(_outcome(samples[number])) for number in chosen}


def _compare(told: dict[str, Any], samples: _Samples, chosen: list[int], modes: Sequence[str], place: str) -> None:
    plain, again = (samples.outcomes(chosen) for _ in range(2))
    if plain != again and not samples.anew:
        samples.anew = True
        plain, again = (samples.outcomes(chosen) for _ in range(2))
    told["runs"] += len(chosen)
    repeatable = {number for number in chosen if plain[number] == again[number]}
    told["unrepeatable"] += len(chosen) - len(repeatable)
    for mode in modes:
        runs = samples.all()
        with gradsan.watch(mode) as watched:  # type: ignore[arg-type]
            made = {number: _outcome(runs[number]) for number in chosen}
        found = {number: _in_bits(one) for number, one in made.items()}
        for number in chosen:
            same = found[number] == plain[number] if number in repeatable else found[number][0] == plain[number][0]
            if same:
                continue
            if found[number][0] == plain[number][0] and _agrees(samples, number, mode, plain[number], found[number]):
                repeatable.discard(number)
                told["unrepeatable"] += 1
                continue
            what = f"{_shown(plain[number])} became {_shown(found[number])}"
            told["different"].append([mode, place, number, what])
        for one in watched.diagnoses:
            told["different"].append([mode, place, -1, f"{one.code} {one.title}"[:_REPORTED]])
        for spot in watched.report.seen.blind_spots:
            if spot.key == "blind.collect_failed":
                told["different"].append([mode, place, -1, str(spot)[:_REPORTED]])


def _agrees(samples: _Samples, number: int, mode: str, plain: Any, found: Any) -> bool:
    """Whether a second run, plain or in the mode, gives what the other gave."""
    again = samples.outcomes([number])[number]
    with gradsan.watch(mode):  # type: ignore[arg-type]
        once_more = samples.outcomes([number])[number]
    return found == again or once_more in (plain, again)


def _outcome(run: Run) -> tuple[str, Any]:
    """("", all that was computed), or ("Error: …", None)."""
    torch.manual_seed(_SEED)
    try:
        return "", run()
    except Exception as error:
        return _short(error), None


def _in_bits(outcome: tuple[str, Any]) -> tuple[str, Any]:
    error, values = outcome
    return error, None if values is None else [_bits(one) for one in values]


def _shown(outcome: tuple[str, Any]) -> str:
    error, bits = outcome
    return error or f"{len(bits)} values"


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".split("\nException raised from")[0][:_REPORTED]


def _bits(value: Any) -> Any:
    if not torch.is_tensor(value):
        return repr(value)
    with torch.no_grad():
        value = value.detach()
        if value.is_nested:
            return [_bits(one) for one in value.unbind()]
        if value.layout is not torch.strided:
            value = value.to_dense()
        if value._is_zerotensor():  # zeros without memory, which no array can be made of
            return "zeros", str(value.dtype), tuple(value.shape)
        kind = (str(value.dtype), tuple(value.shape))
        # Anew, as one element is contiguous in any stride.
        plain = torch.empty(value.numel(), dtype=value.dtype, device="cpu").copy_(value.reshape(-1))
        return kind, plain.view(torch.uint8).numpy().tobytes() if value.numel() else b""


def _samples(target: str, dtype: str, device: str) -> list[Run]:
    kind, _, name = target.partition(":")
    torch.manual_seed(_SEED)
    random.seed(_SEED)
    wanted = getattr(torch, dtype)
    return list((_of_operator if kind == "op" else _of_module)(name, wanted, device))


def _of_operator(name: str, dtype: Any, device: str) -> Iterator[Run]:
    from torch.testing._internal.common_methods_invocations import op_db

    for operator in (one for one in op_db if one.full_name == name):
        if dtype not in operator.supported_backward_dtypes(torch.device(device).type):
            continue
        for sample in operator.sample_inputs(device, dtype, requires_grad=True):
            yield _run_of(operator, sample, operator.supports_gradgrad)
            # Compressed sparse tensors know nothing of strides.
            if all(one.layout is torch.strided for one in _tensors((sample.input, sample.args, sample.kwargs))):
                yield _run_of(operator, sample.noncontiguous(), operator.supports_gradgrad)


def _run_of(operator: Any, sample: Any, twice: bool) -> Run:
    leaves = [one for one in _tensors((sample.input, sample.args, sample.kwargs)) if one.requires_grad]

    def run() -> list[Any]:
        made = operator(sample.input, *sample.args, **sample.kwargs)
        made = made if sample.output_process_fn_grad is None else sample.output_process_fn_grad(made)
        return _differentiated(made, leaves, twice)

    return run


def _of_module(name: str, dtype: Any, device: str) -> Iterator[Run]:
    from torch.testing._internal.common_modules import module_db

    for info in (one for one in module_db if one.name == name):
        if dtype not in info.dtypes:
            continue
        for training in (True, False):
            for made in info.module_inputs_func(info, device, dtype, requires_grad=True, training=training):
                if made.forward_input is None:
                    continue
                build, given = made.constructor_input, made.forward_input
                module = info.module_cls(*build.args, **build.kwargs).to(device, dtype).train(training)
                yield _run_of_module(module, given)


def _run_of_module(module: Any, given: Any) -> Run:
    leaves = [one for one in _tensors((given.args, given.kwargs)) if one.requires_grad] + list(module.parameters())
    return lambda: [*_differentiated(module(*given.args, **given.kwargs), leaves, False), *module.buffers()]


def _differentiated(made: Any, leaves: list[Any], twice: bool) -> list[Any]:
    """What was made, its gradients, those with a graph, and gradients of these."""
    outputs = [one for one in _tensors(made) if one.requires_grad]
    told = list(_tensors(made))
    if not outputs or not leaves:
        return told
    given = [torch.randn_like(one) for one in outputs]
    told += torch.autograd.grad(outputs, leaves, given, retain_graph=True, allow_unused=True)
    if not twice:
        return told
    first = torch.autograd.grad(outputs, leaves, given, create_graph=True, allow_unused=True)
    second = [one for one in first if one is not None and one.requires_grad]
    if second:
        told += torch.autograd.grad(second, leaves, [torch.randn_like(one) for one in second], allow_unused=True)
    return told


def _tensors(value: Any) -> Iterator[Any]:
    if torch.is_tensor(value):
        yield value
    elif isinstance(value, (tuple, list)):
        for one in value:
            yield from _tensors(one)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def _wanted(arguments: Any) -> tuple[Any, ...]:
    return arguments.dtypes, arguments.threads, arguments.modes, arguments.at_most, arguments.device


def _in_child(target: str, arguments: Any, limit: float) -> dict[str, Any]:
    """:func:`sweep` in a forked process; one that dies, or in which a dtype takes too long, is told as different."""
    receiving, sending = multiprocessing.Pipe(duplex=False)

    def work() -> None:
        sending.send((True, sweep(target, *_wanted(arguments), after_each=lambda told: sending.send((False, told)))))

    child = multiprocessing.get_context("fork").Process(target=work)
    child.start()
    sending.close()
    told: dict[str, Any] = {"target": target, "runs": 0, "unrepeatable": 0, "different": []}
    try:
        ended = False
        while not ended:
            if not receiving.poll(limit):
                told["different"].append(["all", "", -1, f"no end of a dtype after {limit:.0f} seconds"])
                break
            ended, told = receiving.recv()
    except EOFError:
        child.join()
        told["different"].append(["all", "", -1, f"the process ended with {child.exitcode}"])
    finally:
        child.kill()
        child.join()
    return told


def _show(lines: list[dict[str, Any]]) -> int:
    bad = [one for one in lines if one["different"]]
    for one in bad:
        told: dict[tuple[str, str], int] = {}
        for mode, _, _, what in one["different"]:
            told[mode, what] = told.get((mode, what), 0) + 1
        for (mode, what), count in told.items():
            print(f"{one['target']}: {mode}, {count}×: {what}")
    for one in lines:
        for dtype, why in one.get("not_made", ()):
            print(f"{one['target']}: no samples in {dtype}: {why}")
    runs, unrepeatable = (sum(one[name] for one in lines) for name in ("runs", "unrepeatable"))
    print(f"{len(lines)} operators and modules, {runs} samples ({unrepeatable} not repeatable), {len(bad)} different")
    return 1 if bad else 0


def main() -> int:
    """Run what is asked for on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("progress", type=Path)
    parser.add_argument("--only", default="*")
    parser.add_argument("--part", default="1/1")
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES))
    parser.add_argument("--modes", nargs="+", default=list(MODES))
    parser.add_argument("--at-most", type=int, default=None)
    parser.add_argument("--limit", type=float, default=900.0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--show", action="store_true")
    arguments = parser.parse_args()
    known = (
        [json.loads(line) for line in arguments.progress.read_text().splitlines()]
        if arguments.progress.exists()
        else []
    )
    if arguments.show:
        return _show(known)
    part, parts = map(int, arguments.part.split("/"))
    names = [one for one in dict.fromkeys(targets()) if fnmatch.fnmatch(one, arguments.only)][part - 1 :: parts]
    done = {one["target"] for one in known}
    with gradsan.watch("deep"):
        pass  # what the first start prepares, the children have then
    with arguments.progress.open("a") as progress:
        for number, name in enumerate(names, 1):
            if name in done:
                continue
            if arguments.device == "cpu":
                found = _in_child(name, arguments, arguments.limit)
            else:
                found = sweep(name, *_wanted(arguments))
            known.append(found)
            print(json.dumps(found), file=progress, flush=True)
            print(
                f"{number}/{len(names)} {name}: {found['runs']} samples, {len(found['different'])} different",
                flush=True,
            )
    return _show(known)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
