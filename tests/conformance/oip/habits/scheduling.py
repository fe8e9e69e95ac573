"""Sequences and timeouts, by ``tritonclient``."""

from __future__ import annotations

import os
import queue
import threading
import time
from typing import Any

import numpy as np

from tests.conformance.oip.habits.case import Server
from tests.conformance.oip.habits.clients import Client, ask, connected, floats, tensor


def sequences(to: Client) -> Any:
    """Return running sums of sequences that run side by side, and what is refused."""

    def step(sequence: Any, values: list[int], **more: Any) -> Any:
        array = np.array(values, np.int64).reshape(-1, 1)
        return ask(to, "accumulate", array, "sum", name="frame", datatype="INT64", sequence_id=sequence, **more)

    base = int.from_bytes(os.urandom(4), "big") + 1000
    one, two, text = base, base + 1, f"caller-{base}"
    return {
        "start": step(one, [1, 2], sequence_start=True),
        "another starts": step(two, [10], sequence_start=True),
        "goes on": step(one, [3]),
        "the other goes on": step(two, [20, 30]),
        "ends": step(one, [4], sequence_end=True),
        "after its end": step(one, [5]),
        "starts again": step(one, [7], sequence_start=True),
        "starts again before its end": step(one, [8], sequence_start=True),
        "ends then": step(one, [1], sequence_end=True),
        "the other ends": step(two, [0], sequence_end=True),
        "start and end at once": step(one, [5, 6], sequence_start=True, sequence_end=True),
        "never started": step(base + 2, [1]),
        "never started, and ends": step(base + 2, [1], sequence_end=True),
        "no sequence": step(0, [1]),
        "no sequence, and starts": step(0, [1], sequence_start=True),
        "a text": step(text, [1], sequence_start=True),
        "a text goes on": step(text, [1], sequence_end=True),
        "the largest number": step(2**63 - 1, [1], sequence_start=True, sequence_end=True),
    }


def sequences_in_a_stream(server: Server) -> Any:
    """Return the answers to two sequences in one stream, by their ids."""
    answers: queue.Queue[Any] = queue.Queue()
    with connected(server, "grpc") as to:
        to.client.start_stream(lambda result, error: answers.put((result, error)))
        base = int.from_bytes(os.urandom(4), "big") + 1000
        for number in range(6):
            to.client.async_stream_infer(
                "accumulate",
                [tensor(to, "frame", np.array([[number]], np.int64), "INT64")],
                request_id=str(number),
                sequence_id=base + number % 2,
                sequence_start=number < 2,
                sequence_end=number > 3,
            )
        got = [answers.get(timeout=30) for _ in range(6)]
        to.client.stop_stream()
    return sorted(
        [result.get_response().id, result.as_numpy("sum").tolist()] if error is None else ["", str(error)]
        for result, error in got
    )


def side_by_side(to: Client, asks: list[dict[str, Any]]) -> list[Any]:
    """Ask the slow model several times, each a little after the other; return the answers in that order."""
    found: list[Any] = [None] * len(asks)

    def run(place: int, seconds: float, more: dict[str, Any]) -> None:
        with connected(to.server, to.wire) as own:
            found[place] = ask(own, "slow", floats(seconds), "calls", **more)

    threads = []
    for place, given in enumerate(asks):
        more = dict(given)
        threads.append(threading.Thread(target=run, args=(place, more.pop("seconds"), more)))
        threads[-1].start()
        time.sleep(0.15)
    for thread in threads:
        thread.join()
    return found


def timeouts(to: Client) -> Any:
    """Return what comes of a request that waits for too long, one that does not, and one that runs for too long."""
    found = side_by_side(
        to, [{"seconds": 0.8}, {"seconds": 0.01, "timeout": 100_000}, {"seconds": 0.01, "timeout": 20_000_000}]
    )
    running = ask(to, "slow", floats(0.4), "calls", timeout=100_000)
    names = ("one that runs", "one that waits too long", "one that waits", "one that runs too long")
    return {
        name: each if isinstance(each[0], str) else "answered"
        for name, each in zip(names, (*found, running), strict=True)
    }
