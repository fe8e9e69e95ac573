"""Hostile bodies against a real Orca server, and innocent clients beside them: ``make oracles``.

After every batch an innocent request must be answered as it was before the first; so must those that ran in the middle
of the batch. The tally counts bodies that were answered, refused (4xx in the documented shape, or 504), ``wrong`` (an
innocent client's answer was another) and ``raw`` (a 5xx, a body that is no documented error, a lost connection).
The line before it says how long the event loop stood still at most, and what memory was taken and kept.
"""

from __future__ import annotations

import importlib.util
import itertools
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.oracles.orca_hostile.bodies import CHAT, known, mutated

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[3]
BATCH = 24
KEPT_NBYTES = 384 * 1024 * 1024  # that a server may keep after it all; allocators kept 143 to 263 MiB of what was freed
INNOCENT: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"model": "tiny", "prompt": "he said", "max_tokens": 8, "temperature": 0, "logprobs": 2}),
    ("/v1/chat/completions", CHAT | {"max_tokens": 8, "temperature": 1.0, "seed": 7, "logprobs": True}),
]


@dataclass
class Seen:
    """Outcomes of the bodies."""

    counts: Counter[str] = field(default_factory=Counter)
    bad: list[str] = field(default_factory=list)
    gap_s: float = 0.0  # the longest that the loop stood still, by the clock
    gap_cpu_s: float = 0.0  # and by the processor time of all the server's threads
    own_s: float = 0.0  # and by that of the loop's own thread
    own_after: str = ""  # the batch that it was seen in
    first_nbytes: int = 0  # resident before
    most_nbytes: int = 0
    last_nbytes: int = 0

    def note(self, outcome: str, what: str) -> None:
        """Count one body."""
        self.counts[outcome] += 1
        if outcome in ("wrong", "raw"):
            self.bad.append(f"{outcome}: {what}")

    @property
    def line(self) -> str:
        """The tally."""
        parts = ", ".join(f"{self.counts[kind]:,} {kind}" for kind in ("answered", "refused", "wrong", "raw"))
        return f"orca-hostile: {sum(self.counts.values()):,} cases: {parts}"


@contextmanager
def running(model: Path, max_model_len: int) -> Iterator[str]:
    """Start the server; yields its URL."""
    command = [sys.executable, str(HERE / "server.py"), str(model), str(max_model_len)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().strip()
            if not url:
                raise RuntimeError(f"the server did not start, it ended with {process.wait()}")
            yield url
        finally:
            process.terminate()


def run(url: str, bodies: Sequence[tuple[str, bytes]], *, name: str, seen: Seen | None = None) -> Seen:
    """Send ``bodies`` in batches with innocent requests among them."""
    seen = seen or Seen()
    # Whoever waits longer than this for an answer of a few tokens has lost it; nothing is decided by less.
    with httpx.Client(base_url=url, timeout=600, headers={"X-Request-Timeout-S": "300"}) as client:
        undisturbed = [_choices(client, path, body) for path, body in INNOCENT]
        state = client.get("/oracle").json()
        seen.first_nbytes = seen.first_nbytes or int(state["rss_nbytes"])
        with ThreadPoolExecutor(8) as pool:
            for number, start in enumerate(range(0, len(bodies), BATCH)):
                batch = list(bodies[start : start + BATCH])
                sent = [pool.submit(_send, client, path, content) for path, content in batch]
                beside = [pool.submit(_choices, client, path, body) for path, body in INNOCENT]
                for (path, content), done in zip(batch, sent, strict=True):
                    outcome, why = done.result()
                    seen.note(outcome, f"{path} {content[:300]!r}: {why}")
                answers = [done.result() for done in beside]
                answers += [_choices(client, path, body) for path, body in INNOCENT]
                for answer, before in zip(answers, itertools.cycle(undisturbed)):
                    if answer != before:
                        seen.note("wrong", f"{name} {number}: {before} became {answer}"[:2000])
                state = client.get("/oracle").json()
                seen.last_nbytes = int(state["rss_nbytes"])
                seen.most_nbytes = max(seen.most_nbytes, seen.last_nbytes)
                seen.gap_s = max(seen.gap_s, state["gap_s"])
                seen.gap_cpu_s = max(seen.gap_cpu_s, state["gap_cpu_s"])
                if state["own_s"] > seen.own_s:
                    seen.own_s, seen.own_after = state["own_s"], f"{name} {number}"
    return seen


def _choices(client: httpx.Client, path: str, body: dict[str, Any]) -> Any:
    answer = client.post(path, json=body)
    while answer.status_code == 429:  # as a client that obeys Retry-After
        answer = client.post(path, json=body)
    return answer.json().get("choices", answer.text)


def _send(client: httpx.Client, path: str, content: bytes) -> tuple[str, str]:
    try:
        answer = client.post(path, content=content, headers={"content-type": "application/json"})
    except httpx.HTTPError as error:
        return "raw", f"the connection ended: {error!r}"
    if answer.status_code < 400:
        return "answered", ""
    try:
        said = answer.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return "raw", f"{answer.status_code} {answer.text[:300]!r}"
    is_refusal = answer.status_code < 500 or answer.status_code == 504
    return ("refused" if is_refusal and "\n" not in said else "raw"), f"{answer.status_code} {said}"


def tiny_model(folder: Path) -> Path:
    """Write the tiny model of the unit tests."""
    spec = importlib.util.spec_from_file_location("orca_conftest", ROOT / "tests" / "orca" / "conftest.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    path: Path = module.write_gguf(folder / "tiny.gguf", module.tiny_metadata(), module.tiny_tensors())
    return path


def report(seen: Seen) -> bool:
    """Print what was seen; return True if all was well."""
    for line in seen.bad[:20]:
        print(line)
    mib = [nbytes / 2**20 for nbytes in (seen.first_nbytes, seen.most_nbytes, seen.last_nbytes)]
    print(f"the loop's thread worked {seen.own_s * 1e3:.0f} ms between two turns at most ({seen.own_after});")
    print(f"all threads together {seen.gap_cpu_s * 1e3:.0f} ms; {seen.gap_s * 1e3:.0f} ms passed by the clock")
    print(f"resident: {mib[0]:.0f} MiB before, {mib[1]:.0f} at most after a batch, {mib[2]:.0f} at the end")
    if seen.last_nbytes - seen.first_nbytes > KEPT_NBYTES:
        seen.note("wrong", f"{mib[2] - mib[0]:.0f} MiB were kept")
    print(seen.line)
    return not seen.bad


def main() -> int:
    """Send the known bodies twice, and 600 mutated ones, to a server of SmolLM2-135M (else of a tiny model)."""
    from mlsys_core.config import settings
    from mlsys_core.errors import MlsysError
    from mlsys_core.models import resolve_model

    with tempfile.TemporaryDirectory() as folder:
        try:
            model, length = Path(resolve_model("smollm2-135m-instruct", settings().cache_dir)), 1024
        except MlsysError:
            model, length = tiny_model(Path(folder)), 128
        with running(model, length) as url:
            seen = Seen()
            for number in range(2):
                run(url, known(), name=f"known bodies, turn {number},", seen=seen)
                print(f"{seen.line}; {seen.own_s * 1e3:.0f} ms; {seen.last_nbytes / 2**20:.0f} MiB", flush=True)
            bodies = mutated(seed=22)
            for number in range(6):
                run(url, list(itertools.islice(bodies, 100)), name=f"mutated bodies {number},", seen=seen)
                print(f"{seen.line}; {seen.own_s * 1e3:.0f} ms; {seen.last_nbytes / 2**20:.0f} MiB", flush=True)
    return int(not report(seen))


if __name__ == "__main__":
    sys.exit(main())
