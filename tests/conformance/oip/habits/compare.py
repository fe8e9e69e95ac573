"""Asks both servers everything, and compares.

    python -m tests.conformance.oip.habits.compare

prints each difference with what both said; ``test_against_triton.py`` compares them with ``differences.py``.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.conformance.oip.habits import bf16, raw_grpc, raw_http, raw_routes, with_clients
from tests.conformance.oip.habits.case import Case, Server
from tests.conformance.oip.habits.triton import ROOT, triton


@dataclass(frozen=True)
class Compared:
    """The two outcomes of one question, and the words of both servers' errors."""

    ours: Any
    triton: Any
    said: tuple[list[str], list[str]]

    @property
    def brief(self) -> tuple[str, str]:
        """Both outcomes, short enough for a table: of two objects, the fields that differ."""
        ours, theirs = self.ours, self.triton
        if isinstance(ours, dict) and isinstance(theirs, dict) and "raw_output_contents" not in ours:
            names = sorted(name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name))
            ours, theirs = ({name: each[name] for name in names if name in each} for each in (ours, theirs))
        return brief(ours), brief(theirs)


def all_cases() -> list[Case]:
    """Return all cases; those that load and unload models are the last."""
    return [*raw_http.cases(), *raw_routes.cases(), *raw_grpc.cases(), *bf16.cases(), *with_clients.cases()]


@contextmanager
def ours() -> Iterator[Server]:
    """Run our server."""
    command = [sys.executable, "-m", "tests.conformance.oip.habits.ours"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        try:
            yield Server(**json.loads(process.stdout.readline()))
        finally:
            process.terminate()


def compared(folder: Path) -> dict[str, Compared]:
    """Start both servers and return all outcomes by name; ``folder`` is empty, for Triton's files."""
    found = {}
    with ours() as our_server, triton(folder) as triton_server:
        for case in all_cases():
            mine, theirs = case.outcomes(our_server), case.outcomes(triton_server)
            said = (list(our_server.said), list(triton_server.said))
            for name in {**mine, **theirs}:
                found[name] = Compared(mine.get(name, "not told"), theirs.get(name, "not told"), said)
    return found


def brief(outcome: Any) -> str:
    """Return an outcome in a few words.

    Example:
        >>> brief([400, "error"]), brief([200, {"outputs": [{"name": "y", "data": [1.5]}]}])
        ('400', '200 [1.5]')
    """
    if isinstance(outcome, list) and outcome[1:] == ["error"]:
        return str(outcome[0])
    if isinstance(outcome, list) and outcome and isinstance(outcome[0], int) and outcome[0] < 400:
        told = [data_of(part) for part in outcome[1:]]
        return " ".join([str(outcome[0]), *(part if isinstance(part, str) else json.dumps(part) for part in told)])
    if isinstance(outcome, dict) and "raw_output_contents" in outcome:
        return f"OK {' '.join(outcome['raw_output_contents'])}"
    return json.dumps(outcome, sort_keys=True)


def data_of(part: Any) -> Any:
    """Return the data of a response's first output, where there are such."""
    try:
        return part["outputs"][0]["data"]
    except (KeyError, TypeError, IndexError):
        return part


def main() -> int:
    """Print all differences."""
    with tempfile.TemporaryDirectory() as folder:
        found = compared(Path(folder))
    different = {name: each for name, each in found.items() if each.ours != each.triton}
    for name, each in different.items():
        print(f"{name}\n  ours:   {each.brief[0]}  {each.said[0][:3]}\n  triton: {each.brief[1]}  {each.said[1][:3]}")
    print(f"{len(found)} answers, {len(different)} differences")
    return 0


if __name__ == "__main__":
    sys.exit(main())
