"""Programs that write and read the same memory leave results and arguments as eager does."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from mlsys_nimble.capture import tracer

from tests.oracles.nimble_writes import run
from tests.oracles.nimble_writes.grammar import CALLS, Program
from tests.oracles.nimble_writes.run import judge, tally_of


def test_programs_that_write_are_as_eager_or_refused():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    tally = tally_of(range(100_000, 100_040))
    torch.set_num_threads(threads)
    assert tally.faults == []
    assert tally.counts["equal"] > 15


def written(
    *lines: str,
    outputs: tuple[str, ...] = ("v0",),
    lies: str = "plain",
    shape: tuple[int, ...] = (4, 4),
    dtype: str = "float32",
):
    return Program(0, shape, dtype, tuple((lies.split() * CALLS)[:CALLS]), lines, outputs)


FOUND = {
    "a list with one tensor twice": written("torch._foreach_add_([v0, v0], [v1, v0])"),
    "a list in order": written("torch._foreach_add_([v0, v1], [v1, v0])", outputs=("v0", "v1")),
    "a source that is the target": written("v0.masked_scatter_(v0 > 0, v0)"),
    "a part with gaps": written("v0[1:] += v0[:-1]", lies="sliced"),
    "interleaved halves": written("v0[:, ::2] += v0[:, 1::2]"),
    "an expanded argument": written("v0[0] = v0[-1]", lies="expanded"),
    "a copy of the whole": written("v2 = v1 * 2", "v2[:] = v0[:]", outputs=("v2", "v0")),
    "copies of one": written("v2 = v1 * 2", "v3 = v2.clone()", "v3[:] = v2.t()", outputs=("v2", "v3")),
    "a scalar's dimension": written("v2 = v0.movedim(0, -1)", shape=()),
    "a negative constant": written("v2 = v0 * 2", "v3 = torch._neg_view(v2)", "v2.fill_(3)", outputs=("v3",)),
    "bools that have a sign": written("v2 = torch._neg_view(v0 == v1)", outputs=("v2",)),
    "a sign that some calls have": written("v2 = v0.resolve_neg()", outputs=("v2",), lies="negative plain"),
    "a part of a conjugate": written("v2 = v0.imag", outputs=("v2",), lies="plain conjugate", dtype="complex64"),
    "wider elements": written("v2 = v0[None].view(torch.int64)", outputs=("v2",), shape=(1, 4)),
    "writes to elements of other kinds": written("v0.view(torch.uint8)[..., :1] = 3", "torch._neg_view(v0).add_(1)"),
    "bytes of one repeated": written(
        "v2 = v0 + v1", "v2.view(torch.uint8).copy_(v0)", outputs=("v2",), shape=(1,), dtype="int32"
    ),
    "writes to parts": written("torch.view_as_real(v0)[..., 0] = 1", "v0.conj().mul_(2j)", dtype="complex64"),
    "other bytes than a bool's": written("v0.view(torch.uint8)[..., :1] = 3", dtype="bool"),
}


REFUSED = (
    *("a source that is the target", "a part with gaps", "an expanded argument"),
    *("bools that have a sign", "other bytes than a bool's"),
)


@pytest.mark.parametrize("name", FOUND)
@pytest.mark.parametrize("path", ["native", "reference"])
def test_programs_that_were_wrong(name: str, path: str):
    found = judge(FOUND[name], path)
    assert found.verdict in ("equal", "refused"), found.reason
    assert found.verdict == "equal" or name in REFUSED


@pytest.mark.parametrize("lines", [("v2 = v0.float()", "v2.unsqueeze_(0)"), ("v2 = v0 - v1", "v2.squeeze_()")])
def test_a_fault_of_torch_compile_itself_is_not_ours(lines: tuple[str, ...]):
    found = judge(written(*lines, "v3 = v2.expand(2, *v2.shape)", outputs=("v3",), shape=(1, 4)), "compile")
    assert found.verdict in ("equal", "not run"), found.reason


def test_rounding_decides_only_what_eager_rounds():
    sums = written("v2 = v0.sum(0)", "v3 = v2 > 0", outputs=("v3",))
    assert not run._rounding_decides(sums)
    assert run._rounding_decides(replace(sums, lines=("v2 = v0.sum(0).view(torch.int32)",), outputs=("v2",)))


def test_an_order_of_writes_that_is_lost_is_wrong(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tracer, "has_overlaps", lambda targets, tensors: False)
    monkeypatch.setattr(tracer, "reads_what_it_writes", lambda *_: False)
    assert judge(FOUND["a list in order"], "native").verdict == "wrong"
