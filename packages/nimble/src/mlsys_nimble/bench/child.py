"""One net's race, in a process of its own: ``python -m mlsys_nimble.bench.child``, with a peers' interpreter or ours.

All contestants live in this process. Prints a line for each step and, last, the outcomes as one line of JSON.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
import warnings
from contextlib import suppress
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from mlsys_nimble.bench.contestants import EAGER, MAKERS, SLOW_TO_PREPARE, Bout, LeftOut, Ready
from mlsys_nimble.bench.race import EAGER_TIMES, TOLERANCE, Outcome, take_turns
from mlsys_nimble.nets.blocks import Net


def run(
    model: str, *, num_threads: int, budget_s: float, is_quick: bool, cache_dir: Path, trust_code: bool = False
) -> dict[str, Outcome]:
    """Make every contestant ready for ``model``, compare, time."""
    from mlsys_nimble.nets.resolve import load_model

    torch.set_num_threads(num_threads)
    torch.manual_seed(0)
    net = load_model(model, trust_code=trust_code)
    folder = cache_dir / "nimble" / "bench" / f"{_as_file_name(model)}-{_fingerprint(net.module)}"
    folder.mkdir(parents=True, exist_ok=True)
    bout = Bout(net, num_threads, folder)
    outcomes: dict[str, Outcome] = {}
    ready: dict[str, Ready] = {}
    _say(f"{model}: Nimble's kernels, compiled on first use")
    with suppress(Exception):  # whatever it is, Nimble's own turn tells it
        build_kernels()
    with torch.no_grad():
        expected = exact_results(net)
        allowed = TOLERANCE
        for name, make in MAKERS.items():
            _say(f"{model}: {name}")
            if is_quick and name in SLOW_TO_PREPARE:
                outcomes[name] = Outcome("left out", "not in --quick: it compiles for minutes")
                continue
            started = time.perf_counter()
            try:
                made = make(bout)
                results = made.tensors(made.call())
                prepare_s = time.perf_counter() - started
                difference = relative_difference(results, expected)
                if name == EAGER:  # the first: some nets make more of rounding than others
                    allowed = max(TOLERANCE, EAGER_TIMES * difference)
            except Exception as error:  # noqa: BLE001 - a contestant may fail in any way; it is reported
                outcomes[name] = _failure(error)
                continue
            if not difference <= allowed:
                outcomes[name] = Outcome("differs", f"by {difference:.1e} of the largest value", None, prepare_s)
                continue
            outcomes[name] = Outcome("timed", made.note, difference, prepare_s)
            ready[name] = made
        _say(f"{model}: {len(ready)} contestants in turns, {budget_s:.0f} s")
        turns = take_turns(
            {name: made.call for name, made in ready.items()},
            budget_s=budget_s,
            turn_s=0.1,
            clock=time.perf_counter,
            sleep=time.sleep,
        )
    for name, samples in turns.items():
        one = outcomes[name]
        outcomes[name] = Outcome("timed", one.note, one.difference, one.prepare_s, tuple(samples))
    return outcomes


def exact_results(net: Net) -> list[torch.Tensor]:
    """What the net gives when all is computed in float64."""
    inputs = (x.double() if x.is_floating_point() else x for x in net.inputs)
    results = copy.deepcopy(net.module).eval().double()(*inputs)
    return [leaf for leaf in tree_leaves(results) if isinstance(leaf, torch.Tensor)]


def build_kernels() -> None:
    """Have the native library in the cache, so that no net's preparation pays for a C++ compiler's minute."""
    from mlsys_nimble.module import Nimble

    Nimble(torch.nn.ReLU()).prepare(torch.zeros(1))


def relative_difference(results: Any, expected: list[torch.Tensor]) -> float:
    """The largest difference of any result, over the largest value it should have; infinite if unlike in form."""
    if len(results) != len(expected):
        return float("inf")
    largest = 0.0
    for result, wanted in zip(results, expected, strict=True):
        got = torch.as_tensor(result)
        if got.shape != wanted.shape:
            return float("inf")
        if wanted.numel():
            off = (got.double() - wanted.double()).abs().max() / wanted.double().abs().max().clamp_min(1e-12)
            largest = max(largest, float("inf") if off.isnan() else float(off))
    return largest


def _failure(error: Exception) -> Outcome:
    if isinstance(error, LeftOut):
        return Outcome("left out", str(error))
    if isinstance(error, ModuleNotFoundError):
        return Outcome("not installed", f"no package {error.name}")
    text = " ".join(str(error).split())
    return Outcome("does not run", f"{type(error).__name__}: {text[:300]}")


def _fingerprint(module: torch.nn.Module) -> str:
    """Of the weights and the modules' text: what is exported from another net is not taken for this one's."""
    digest = sha256(str(module).encode())
    for tensor in module.state_dict().values():
        digest.update(tensor.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()[:12]


def _as_file_name(model: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "-_" else "-" for letter in model)


def _say(text: str) -> None:
    print(text, flush=True)


def main() -> int:
    """The command line, for :mod:`mlsys_nimble.bench.suite`."""
    parser = argparse.ArgumentParser(prog="python -m mlsys_nimble.bench.child", description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--trust-code", action="store_true")
    parser.add_argument("--cache-dir", type=Path, required=True)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    outcomes = run(
        arguments.model,
        num_threads=arguments.threads,
        budget_s=arguments.seconds,
        is_quick=arguments.quick,
        cache_dir=arguments.cache_dir,
        trust_code=arguments.trust_code,
    )
    _say(json.dumps({name: asdict(outcome) for name, outcome in outcomes.items()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
