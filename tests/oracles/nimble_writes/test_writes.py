"""Programs that write and read the same memory leave results and arguments as eager does."""

from __future__ import annotations

import pytest
import torch
from mlsys_nimble.capture import tracer

from tests.oracles.nimble_writes.grammar import CALLS, Program
from tests.oracles.nimble_writes.run import judge, tally_of


def test_programs_that_write_are_as_eager_or_refused():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    tally = tally_of(range(100_000, 100_040))
    torch.set_num_threads(threads)
    assert tally.faults == []
    assert tally.counts["equal"] > 15


def written(*lines: str, outputs: tuple[str, ...] = ("v0",), lies: str = "plain", shape: tuple[int, ...] = (4, 4)):
    return Program(0, shape, "float32", (lies,) * CALLS, lines, outputs)


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
}


REFUSED = ("a source that is the target", "a part with gaps", "an expanded argument")


@pytest.mark.parametrize("name", FOUND)
@pytest.mark.parametrize("path", ["native", "reference"])
def test_programs_that_were_wrong(name: str, path: str):
    found = judge(FOUND[name], path)
    assert found.verdict in ("equal", "refused"), found.reason
    assert found.verdict == "equal" or name in (
        "a source that is the target",
        "a part with gaps",
        "an expanded argument",
    )


def test_an_order_of_writes_that_is_lost_is_wrong(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tracer, "has_overlaps", lambda targets, tensors: False)
    monkeypatch.setattr(tracer, "reads_what_it_writes", lambda *_: False)
    assert judge(FOUND["a list in order"], "native").verdict == "wrong"
