"""Runners of a case: its own server over HTTP, or its engine in a child process without one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Protocol

import httpx

from mlsys_bench.harness.child import environment, free_port
from mlsys_bench.orca.peers.cases import Job, PeerCase, Settings, child_command
from mlsys_bench.orca.peers.traffic import Traffic
from mlsys_bench.workload.http_target import HttpTarget
from mlsys_bench.workload.loadgen import LoadOptions, run_load_blocking
from mlsys_bench.workload.results import LoadResult, RequestRecord

READY_WITHIN_S = 600.0
REQUEST_WITHIN_S = 4 * 3600.0  # a prompt of 32,768 tokens takes half an hour behind some
_STOP_WITHIN_S = 20.0


class Runner(Protocol):
    """Sends traffic, one run after another."""

    def run(self, traffic: Traffic) -> LoadResult:
        """Send all of ``traffic`` and wait for its end."""
        ...


class NotReadyError(Exception):
    """A case ended, or did not answer in time; the text ends with its last lines."""


@contextmanager
def running(case: PeerCase, job: Job, settings: Settings, *, is_in_process: bool, log: Path) -> Iterator[Runner]:
    """Start ``case`` with ``settings`` and yield its runner once it answers; end it with the context.

    Args:
        case: The case.
        job: Its model and threads.
        settings: Its settings.
        is_in_process: Its engine in a child process; otherwise its server.
        log: The file that gets its output.

    Raises:
        NotReadyError: it could not be started.
    """
    port = None if is_in_process else free_port()
    if port is None:
        arguments = child_command(case.engine, case.engine_options(job, settings), None)
    else:
        arguments = case.server(job, settings, port)
    with log.open("w") as output:
        process = subprocess.Popen(
            [str(case.python(job)), *arguments],
            env=environment() | dict(case.variables(job)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE if port is None else output,
            stderr=output,
            text=True,
            start_new_session=True,  # a group of its own, to be ended whole
        )
        try:
            runner = _Child(process, log) if port is None else _Server(process, log, case, port)
            runner.wait_until_ready()
            yield runner
        finally:
            _end(process)


class _Server:
    def __init__(self, process: subprocess.Popen[str], log: Path, case: PeerCase, port: int) -> None:
        self._process, self._log = process, log
        self._body = {"model": "model", **case.body}
        self._url = f"http://127.0.0.1:{port}/v1"

    def wait_until_ready(self) -> None:
        """Wait until a request of one token is answered."""
        first = {**self._body, "prompt": [300], "max_tokens": 1, "stream": True}
        last = "no answer"
        deadline = time.monotonic() + READY_WITHIN_S
        with httpx.Client(verify=False, trust_env=False, timeout=60) as client:  # loading certificates takes long
            while time.monotonic() < deadline and self._process.poll() is None:
                with suppress(httpx.TransportError):
                    answer = client.post(f"{self._url}/completions", json=first)
                    if answer.is_success:
                        return
                    last = f"{answer.status_code} {answer.text[:300]}"
                    if answer.is_client_error:
                        break
                time.sleep(0.5)
        raise NotReadyError(f"not ready ({last}); {_tail(self._log)}")

    def run(self, traffic: Traffic) -> LoadResult:
        target = HttpTarget.openai(self._url, model="model", keep_output=True)
        trace = traffic.over_http(self._body)
        return run_load_blocking(trace, target, options=LoadOptions(timeout_s=REQUEST_WITHIN_S))


class _Child:
    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._requests: IO[str] = process.stdin
        self._answers: IO[str] = process.stdout
        self._log = log

    def wait_until_ready(self) -> None:
        """Wait for its first line."""
        self._answer()

    def _answer(self) -> Any:
        line = self._answers.readline()
        if not line:
            raise NotReadyError(_tail(self._log))
        return json.loads(line)

    def run(self, traffic: Traffic) -> LoadResult:
        self._requests.write(json.dumps(traffic.in_process()) + "\n")
        self._requests.flush()
        return result_of(traffic, self._answer())


def result_of(traffic: Traffic, answers: Sequence[dict[str, Any]]) -> LoadResult:
    """Return a child process's report in the form of the load generator's result."""
    records = tuple(
        RequestRecord(
            index=item.index,
            scheduled_s=item.arrival_s,
            sent_s=answer["sent_s"],
            done_s=answer["token_s"][-1],
            token_s=tuple(answer["token_s"]),
            num_input_tokens=item.num_input_tokens,
            num_output_tokens=len(answer["tokens"]),
            num_planned_tokens=item.num_output_tokens,
            output=traffic.text(answer["tokens"]),
        )
        for item, answer in zip(traffic.trace, answers, strict=True)
    )
    return LoadResult(name="in-process", records=records, num_planned=len(records), max_connections=len(records))


def _tail(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return f"{log} ends:\n  " + "\n  ".join(line[:200] for line in lines[-6:])


def _end(process: subprocess.Popen[str]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_WITHIN_S)
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with suppress(OSError):  # input that it did not read
                stream.close()
