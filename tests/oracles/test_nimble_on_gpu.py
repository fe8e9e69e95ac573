"""Nimble's oracles on a CUDA device: torch's own test data of all operators, and random programs."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

from tests.oracles.nimble_opinfo.cases import VARIANTS, Case, cases_of, operators
from tests.oracles.nimble_opinfo.judge import Tally, clones, judge
from tests.oracles.nimble_programs.run import draw

pytestmark = pytest.mark.gpu
PARTS = 12
IN_PLACE = [variant for variant in VARIANTS if variant != "out"]  # whose results are on the CPU


@pytest.fixture(autouse=True)
def exact() -> None:
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.set_num_threads(1)


def is_valid(case: Case) -> bool:
    """Return whether it has tensors, and the CPU runs it: an index out of range ends the process's use of a GPU."""
    if not case.tensors:
        return False  # nothing lies on a device
    try:
        case.function(*clones(case.tensors))
    except Exception:  # noqa: BLE001 whatever it is
        return False
    return True


@pytest.mark.parametrize("part", range(PARTS))
def test_operators_give_what_eager_gives(part: int, caplog: pytest.LogCaptureFixture) -> None:
    tally = Tally("nimble-opinfo, CUDA")
    for number, info in enumerate(operators()):
        if number % PARTS != part:
            continue
        turns = [("float32", "plain"), ("float32", IN_PLACE[number % len(IN_PLACE)])]
        if info.name == "nn.functional.batch_norm":  # eager on cuDNN updates a copy of statistics that lie apart
            turns = [turn for turn in turns if turn[1] == "plain"]
        turns.append((("bfloat16", "int64", "complex64", "bool")[number % 4], "plain"))
        for dtype, variant in turns:
            for case in cases_of(info, dtype, most_samples=1, variants=(variant,)):
                if not is_valid(case):
                    continue
                on_gpu = replace(case, tensors=tuple(tensor.cuda() for tensor in case.tensors))
                tally.add(judge(on_gpu, "cuda"))
    reasons = Counter(record.getMessage() for record in caplog.records if "no CUDA graph" in record.getMessage())
    print(tally, reasons)
    assert tally.faults == []
    assert tally.counts["equal"] > 40
    assert reasons.total() < 0.2 * tally.counts["equal"]  # nearly all are captured


@pytest.mark.parametrize("path", ["cuda", "training"])
@pytest.mark.parametrize("number", range(3))
def test_random_programs_give_what_eager_gives(path: str, number: int) -> None:
    tally = draw(path, 40 if path == "cuda" else 6, number=number, device="cuda")
    print(tally)
    assert tally.faults == []
    assert tally.counts["equal"] > (25 if path == "cuda" else 2)
