"""The same programs on other compilers: TorchInductor, ONNX Runtime and OpenVINO, each in a process that may crash.

``full.py --peer NAME COUNT`` calls :func:`tally_of`. A program that a peer cannot prepare, its first call included, is
refused.
"""

from __future__ import annotations

import logging
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import torch
from mlsys_core.errors import MlsysError

from tests.oracles.nimble_opinfo.cases import Call
from tests.oracles.nimble_opinfo.judge import Judgement
from tests.oracles.nimble_writes.grammar import Program, program
from tests.oracles.nimble_writes.run import Run, judge

TIMEOUT_S = 120.0  # of one program


def _inductor(drawn: Program, function: Run) -> Run:
    torch._dynamo.reset()
    compiled: Run = torch.compile(Call(function), backend="inductor", dynamic=False)
    return compiled


def _onnxruntime(drawn: Program, function: Run) -> Run:
    import onnxruntime

    names = ["v0", "v1"]
    exported = torch.onnx.export(Call(function), drawn.arguments(0), dynamo=True, verbose=False, input_names=names)
    session = onnxruntime.InferenceSession(exported.model_proto.SerializeToString())
    read = {given.name for given in session.get_inputs()}

    def run(*args: torch.Tensor) -> Sequence[torch.Tensor]:
        given = {name: _numbers(each) for name, each in zip(names, args, strict=True) if name in read}
        return [torch.from_numpy(each) for each in session.run(None, given)]

    return run


def _openvino(drawn: Program, function: Run) -> Run:
    import openvino

    with torch.no_grad():
        exported = torch.export.export(Call(function), drawn.arguments(0))
    model = openvino.compile_model(openvino.convert_model(exported), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})

    def run(*args: torch.Tensor) -> Sequence[torch.Tensor]:
        found = model([_numbers(each) for each in args][: len(model.inputs)])
        return [torch.from_numpy(found[n]).clone() for n in range(len(drawn.outputs))]

    return run


def _numbers(tensor: torch.Tensor) -> Any:
    return tensor.resolve_conj().resolve_neg().contiguous().numpy()


PEERS: dict[str, Callable[[Program, Run], Run]] = {
    "inductor": _inductor,
    "onnxruntime": _onnxruntime,
    "openvino": _openvino,
}


def _prepare(peer: str, drawn: Program, function: Run) -> Run:
    try:
        prepared = PEERS[peer](drawn, function)
        prepared(*drawn.arguments(0))
        return prepared
    except Exception as error:
        raise MlsysError(f"{type(error).__name__}: {error}") from error


def _answer(peer: str, wire: Connection) -> None:
    """Judge programs by the seeds that come, in a process of its own."""
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    while (seed := wire.recv()) is not None:
        drawn = program(seed)
        wire.send(drawn and judge(drawn, peer, partial(_prepare, peer)))


class _Judge:
    """Process that judges programs; one that dies is followed by another."""

    def __init__(self, peer: str) -> None:
        self._peer = peer
        self._process: Any = None
        self._wire: Any = None

    def verdict(self, seed: int) -> Judgement | None:
        """Return the verdict on a seed's program; None where it has none."""
        if self._process is None:
            context = get_context("spawn")
            self._wire, theirs = context.Pipe()
            self._process = context.Process(target=_answer, args=(self._peer, theirs), daemon=True)
            self._process.start()
            theirs.close()
        self._wire.send(seed)
        reason = f"no answer in {TIMEOUT_S:.0f} s"
        try:
            if self._wire.poll(TIMEOUT_S):
                return self._wire.recv()  # type: ignore[no-any-return]
        except EOFError:
            reason = "the process ended"
        self.close()
        return Judgement(f"seed {seed}", self._peer, "raw", reason)

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._process = None


def tally_of(peer: str, seeds: Iterable[int]) -> Counter[str]:
    """Count verdicts; where the first thing that differs is an argument after the call, "wrong: argument"."""
    counts: Counter[str] = Counter()
    judge_ = _Judge(peer)
    for seed in seeds:
        if (found := judge_.verdict(seed)) is None:
            continue
        place, drawn = re.search(r"result (\d+)", found.reason), program(seed)
        is_argument = found.verdict == "wrong" and place and drawn and int(place[1]) >= len(drawn.outputs)
        counts["wrong: argument" if is_argument else found.verdict] += 1
        if found.verdict in ("wrong", "raw"):
            print(f"{found.verdict}: seed {seed}: {found.reason}", flush=True)
    judge_.close()
    return counts
