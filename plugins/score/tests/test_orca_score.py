"""Orca on the score: an engine's iterations, a worker's reports, and the same requests under another policy."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from typing import Any

import httpx
import pytest
from mlsys_core.plugins import installed_plugins
from mlsys_orca.engine import wire
from mlsys_orca.engine.recovery import LiveRequest
from mlsys_orca.engine.settings import EngineCounts
from mlsys_orca.engine.watching.feed import IterationFeed, Part
from mlsys_orca.engine.watching.remote import parts_of
from mlsys_orca.scheduling.batch import GenerationRequest, SampledToken
from mlsys_score.board import Board
from mlsys_score.recording import parse_recording
from mlsys_serving.extensions import Extensions

from tests.orca.server.conftest import Serve

PAGE = Extensions.of("orca", installed_plugins().registry)


def record(url: str, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
    """Serve ``prompts`` at once, in one request, while a page looks on; return what it saw."""
    with httpx.stream("GET", url + "/ui/score/events", timeout=60) as stream:
        lines = stream.iter_lines()
        next(lines)  # the snapshot: the engine is watched from now on
        body = {"model": "tiny", "prompt": prompts, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        answer = httpx.post(url + "/v1/completions", json=body, timeout=60)
        assert answer.status_code == 200
        assert len(answer.json()["choices"]) == len(prompts)
        return httpx.get(url + "/ui/score/recording").json()


def tally(recording: dict[str, Any]) -> dict[int, dict[str, int]]:
    """Return, for each row, its rows of prefill and the tokens that its decodes gave."""
    found: dict[int, dict[str, int]] = defaultdict(lambda: {"prefill": 0, "decode": 0, "again": 0})
    names = {"p": "prefill", "d": "decode", "g": "decode", "r": "again", "x": "again"}
    for column in recording["columns"]:
        for row, kind, num_tokens, _ in column["squares"]:
            found[row][names[kind]] += num_tokens
    return dict(found)


def test_every_token_is_on_the_score(serve: Serve):
    prompts = [[5 + i] * (3 + 7 * i) for i in range(5)]
    with serve(extensions=PAGE, policy_options={"max_batch_tokens": 16}) as (url, engine):
        recording = record(url, prompts, 6)
    parse_recording(json.dumps(recording))
    by_prompt = {row["prompt"]: row for row in recording["rows"]}
    assert sorted(by_prompt) == [len(prompt) for prompt in prompts]
    counts = tally(recording)
    for num_prompt, row in by_prompt.items():
        assert row["reason"] == "length"
        assert row["opened"] <= row["ended"]
        assert row["max_new"] == 6
        # The last token of a prompt may be a chunk of its own, which counts as a decode.
        assert num_prompt + 5 == counts[row["row"]]["prefill"] + counts[row["row"]]["decode"]
    for column in recording["columns"]:
        assert sum(column["split"].values()) == pytest.approx(column["ms"], abs=0.01)
        assert len(column["squares"]) <= 4
        assert sum(square[2] for square in column["squares"]) <= 16
        assert 0 <= column["free"] <= engine.shape.num_blocks
    facts = recording["facts"]
    assert facts["policy"] == "chunked"
    assert facts["num_blocks"] == engine.shape.num_blocks


def test_the_first_viewer_sees_what_has_just_run(serve: Serve):
    with serve(extensions=PAGE) as (url, _):
        body = {"model": "tiny", "max_tokens": 6, "temperature": 0, "ignore_eos": True, "prompt": [5] * 10}
        assert httpx.post(url + "/v1/completions", json=body, timeout=60).status_code == 200
        recording = httpx.get(url + "/ui/score/recording").json()
    [row] = recording["rows"]
    assert (row["prompt"], row["max_new"], row["reason"]) == (10, 6, "length")
    assert "".join(kind for column in recording["columns"] for _, kind, _, _ in column["squares"]) == "pddddd"
    assert recording["columns"][0]["t"] >= row["opened"] == 0.0
    assert recording["waiting"] == 0


def test_preempted_requests_compute_again(serve: Serve):
    prompts = [[5 + i] * 20 for i in range(3)]
    options = {"policy": "paged", "num_kv_tokens": 96, "policy_options": {"watermark": 0.0}}
    with serve(extensions=PAGE, **options) as (url, engine):
        recording = record(url, prompts, 40)
        num_preemptions = engine.counts().pool.num_preemptions
    squares = [square for column in recording["columns"] for square in column["squares"]]
    assert sum(kind == "x" for _, kind, _, _ in squares) == num_preemptions > 0
    kinds: dict[int, str] = {}
    for row, kind, _, _ in squares:
        kinds[row] = kinds.get(row, "") + kind
    # What is computed again may come in several pieces; each preemption has at least one, right behind it.
    assert (
        sum(after == "r" for each in kinds.values() for before, after in pairwise(each) if before == "x")
        == num_preemptions
    )
    assert all(before in "xr" for each in kinds.values() for before, after in pairwise(each) if after == "r")
    held: dict[int, list[int]] = {}
    for column in recording["columns"]:
        for row, kind, _, _ in column["squares"]:
            if kind == "x":
                held.pop(row, None)
        for row, first, blocks in column.get("tables", ()):
            held[row] = [*held.get(row, [])[:first], *blocks]
        blocks = [block for table in held.values() for block in table]
        assert all(0 <= block < engine.shape.num_blocks for block in blocks)


def test_a_worker_s_report_gives_the_same_parts():
    request = GenerationRequest(request_id="a", prompt_token_ids=(1,) * 10, max_new_tokens=4)
    live = {handle: LiveRequest(handle, request) for handle in range(4)}
    live[1].tokens, live[1].num_computed_tokens = [SampledToken("a", 3)], 10  # decodes
    live[2].tokens, live[2].num_computed_tokens = [SampledToken("a", 3)], 10  # decodes with guesses
    live[3].tokens, live[3].num_computed_tokens = [SampledToken("a", 3)] * 3, 12  # ends: it has no seal
    report = wire.Iteration(
        tokens=tuple(wire.Token(handle, 7, None, (), cached) for handle, cached in [(1, 0), (2, 0), (2, 0), (3, 0)]),
        scored=(),
        seals=(wire.Seal(0, 8, (4,), 6), wire.Seal(1, 11, None, 1), wire.Seal(2, 12, (5, 6), 4)),
        counts=EngineCounts(num_blocks=8, num_free_blocks=4, pool=None),
        slowest_s=0.0,
        most_work=0.0,
        started_s=1.0,
        ended_s=2.0,
    )
    report = wire.decode_report(wire.encode(report))
    parts = parts_of(live, report)
    found = [(part.num_rows, part.is_decode, part.num_new, part.block_table) for part in parts]
    assert found == [(6, False, 0, (4,)), (1, True, 1, ()), (4, True, 2, (5, 6)), (1, True, 1, ())]


def test_a_worker_s_death_is_seen():
    board = Board(system="orca", unit="iteration", clock=lambda: 0.0)
    feed = IterationFeed(board)
    for name in ("kept", "lost"):
        feed.add(0.0, 0.01, [Part(name, 1, True, 1, (4,))])
        feed.interrupted(name)
    feed.add(0.9, 1.0, [Part("kept", 1, True, 1, (4,)), Part("lost", 4, False, 0, ()), Part("other", 4, False, 1, ())])
    feed.add(1.0, 1.1, [Part("kept", 1, True, 1, (4,)), Part("lost", 4, False, 1, ())])
    feed.add(1.1, 1.2, [Part("kept", 1, True, 1, (4,)), Part("lost", 1, True, 1, ())])
    kinds = ["".join(square.kind for square in column["squares"]) for column in board.snapshot()["columns"]]
    assert kinds == ["d", "d", "rrp", "dr", "dd"]
