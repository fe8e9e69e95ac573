"""Judge a program of writes: results and arguments of several calls, at once and after the calls that follow."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from mlsys_core.errors import MlsysError
from mlsys_nimble import prepared
from mlsys_nimble.errors import InternalError
from mlsys_nimble.module import Nimble
from mlsys_nimble.passes import PASSES

from tests.oracles.nimble_opinfo.cases import Call
from tests.oracles.nimble_opinfo.compare import compare
from tests.oracles.nimble_opinfo.judge import Judgement, Tally
from tests.oracles.nimble_writes.grammar import CALLS, Program, program

Run = Callable[..., Sequence[torch.Tensor]]
JUMPS = (".view(torch.", "> 0", "==", "arg", "sort", "int64)", "remainder", "floor_divide")  # show roundings
ROUNDED = ("addcmul", "lerp", "sin_", "softmax", "cumsum", "sum", "mean", "@", "pow_", "alpha")


def judge(program: Program, path: str) -> Judgement:
    """Compare with eager; ``path`` is an executor, "compile", or "some passes", by the program's seed."""
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        found = _judged(program, path)
        text = "; ".join(program.lines)
        if found.verdict == "wrong" and any(map(text.count, JUMPS)) and any(map(text.count, ROUNDED)):
            return replace(found, verdict="not run", reason="rounding decides")
    return found


def _judged(program: Program, path: str) -> Judgement:
    function = program.function()
    try:
        function(*program.arguments(0))
    except Exception as error:  # noqa: BLE001 not a program
        return Judgement(str(program), path, "not run", f"eager: {type(error).__name__}")
    try:
        with patch.object(prepared, "PASSES", _passes(program.seed, path)):
            difference = _first_difference(program, function, _prepared(program, function, path))
    except InternalError as error:
        return Judgement(str(program), path, "raw", str(error)[:300])
    except MlsysError as error:
        return Judgement(str(program), path, "refused", f"{type(error).__name__}: {error}")
    except Exception as error:  # noqa: BLE001 what the oracle looks for
        if "torch._dynamo" in type(error).__module__:
            return Judgement(str(program), path, "not run", f"torch.compile itself: {type(error).__name__}")
        return Judgement(str(program), path, "raw", f"{type(error).__name__}: {str(error)[:300]}")
    return Judgement(str(program), path, "wrong" if difference else "equal", difference)


def _prepared(program: Program, function: Run, path: str) -> Run:
    if path == "compile":
        torch._dynamo.reset()
        return torch.compile(Call(function), backend="nimble", dynamic=False, options={"num_threads": 1})
    executor = "native" if path == "some passes" else path
    return Nimble(Call(function)).prepare(program.arguments(0), executor=executor, num_threads=1)


def _passes(seed: int, path: str) -> tuple[Any, ...]:
    return tuple(one for n, one in enumerate(PASSES) if path != "some passes" or seed >> n % 11 & 1)


def _first_difference(program: Program, eager: Run, run: Run) -> str:
    """Call both, write to a result, and call both on a result; compare all that is known after each."""
    theirs: list[list[Any]] = []  # of each call: results, then arguments
    ours: list[list[Any]] = []
    for call in range(CALLS):
        given, same = program.arguments(call), program.arguments(call)
        if call == CALLS - 1:
            if not any(torch._debug_has_internal_overlap(results[-1][0]) for results in (theirs, ours)):
                theirs[-1][0].zero_()
                ours[-1][0].zero_()
            if difference := _compared(ours, theirs):
                return f"a write to a result: {difference}"
            if (theirs[0][0].shape, theirs[0][0].dtype) == (given[0].shape, given[0].dtype):
                given, same = (theirs[0][0], given[1]), (ours[0][0], same[1])
        try:
            theirs.append([*eager(*given), *given])
        except RuntimeError:  # as for a write to an expanded argument
            break
        ours.append([*run(*same), *same])
        if difference := _compared(ours, theirs):
            return f"call {call}: {difference}"
    return ""


def _compared(ours: list[list[Any]], theirs: list[list[Any]]) -> str:
    found = (
        f"of call {n}, {compare(*pair)}" for n, pair in enumerate(zip(ours, theirs, strict=True)) if compare(*pair)
    )
    return next(found, "")


def shrunk(program: Program, path: str) -> Program:
    """Return a smaller program with the same verdict."""
    verdict = judge(program, path).verdict

    def fails(smaller: Program) -> bool:
        return bool(smaller.outputs) and judge(smaller, path).verdict == verdict

    is_smaller = True
    while is_smaller:
        is_smaller = False
        options = [replace(program, lies=("plain",) * CALLS)] if set(program.lies) > {"plain"} else []
        for field in ("lines", "outputs"):
            items = getattr(program, field)
            options += [replace(program, **{field: items[:n] + items[n + 1 :]}) for n in reversed(range(len(items)))]
        for option in options:
            if fails(option):
                program, is_smaller = option, True
                break
    return program


PATHS = ("native", "some passes", "native", "reference", "some passes", "native", "some passes")


def tally_of(seeds: Iterable[int]) -> Tally:
    """Judge the programs of some seeds, each along a path; faults are shrunk."""
    tally = Tally("nimble-writes")
    for seed in seeds:
        drawn, path = program(seed), "compile" if seed % 50 == 49 else PATHS[seed % len(PATHS)]
        if drawn is None:
            continue
        found = judge(drawn, path)
        tally.add(judge(shrunk(drawn, path), path) if found.verdict in ("wrong", "raw") else found)
    return tally
