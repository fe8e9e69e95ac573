"""``make fuzz``: mutated inputs to every parser that meets the outside, and a tally of each.

    python -m tests.fuzz.run --runs 100000
    python -m tests.fuzz.run --target gguf --runs 5000 --seed 7
    python -m tests.fuzz.run --target gguf --show 123        # write input 123 to report/fuzz, and parse it here

A crash is anything raised that is no refusal, or a process that dies; a hang is more than a second of processor time.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from tests.fuzz.target import Target, all_targets, write_folder

STUCK_S = 30.0  # of processor time on one input: the process is ended
CHUNK = 20_000  # inputs of one process at most


@dataclass
class Tally:
    """Outcomes of a target's inputs."""

    runs: int = 0
    refused: int = 0
    taken: int = 0
    growth_nbytes: int = 0
    seconds: float = 0.0
    crashes: list[tuple[int, str]] = field(default_factory=list)
    hangs: list[tuple[int, str]] = field(default_factory=list)


def fuzz(target: Target, *, runs: int, seed: int) -> Tally:
    """Give ``runs`` inputs to a target's parser, in processes of their own."""
    tally, start, began = Tally(), 0, time.monotonic()
    while start < runs:
        start = _run_process(target, seed, start, min(runs, start + CHUNK), tally)
    tally.runs, tally.seconds = runs, time.monotonic() - began
    tally.taken = max(tally.taken, 0)
    return tally


def _run_process(target: Target, seed: int, start: int, stop: int, tally: Tally) -> int:
    """Run one worker; return the index to go on with."""
    with tempfile.NamedTemporaryFile() as progress:
        progress.write(struct.pack("<q", start - 1))
        progress.flush()
        command = [sys.executable, "-m", "tests.fuzz.worker", target.name, "--seed", str(seed)]
        command += ["--start", str(start), "--stop", str(stop), "--progress", progress.name]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        ) as process:
            stuck = threading.Event()
            watch = threading.Thread(target=_watch, args=(process, Path(progress.name), stuck), daemon=True)
            watch.start()
            out, err = process.communicate()
        watch.join()
        index = struct.unpack("<q", Path(progress.name).read_bytes()[:8])[0]
    is_done = False
    for line in out.splitlines():
        said = json.loads(line)
        if said["kind"] == "done":
            is_done = True
            tally.refused += said["refused"]
            tally.taken += said["taken"]
            tally.growth_nbytes = max(tally.growth_nbytes, said["growth"])
        else:
            (tally.crashes if said["kind"] == "crash" else tally.hangs).append((said["index"], said["what"]))
    if is_done:
        return stop
    last = (err.strip().splitlines() or ["nothing said"])[-1]
    if index < start:
        raise RuntimeError(f"{target.name}: the worker ended before its first input: {last}")
    if stuck.is_set():
        tally.hangs.append((index, f"ended after {STUCK_S:.0f} s"))
    else:
        code = process.returncode
        name = signal.Signals(-code).name if code < 0 else f"exit {code}"
        tally.crashes.append((index, f"the process died ({name}): {last[:200]}"))
    return index + 1


def _watch(process: subprocess.Popen[str], progress: Path, stuck: threading.Event) -> None:
    """End the process where one input takes it too much processor time."""
    ticks, at, since = os.sysconf("SC_CLK_TCK"), None, 0.0
    while process.poll() is None:
        try:
            stat = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
            now = progress.read_bytes()
        except (OSError, IndexError):
            return
        spent = (int(stat[11]) + int(stat[12])) / ticks
        if now != at:
            at, since = now, spent
        elif spent - since > STUCK_S and struct.unpack("<q", now)[0] >= 0:
            stuck.set()
            process.kill()
            return
        time.sleep(0.2)


def tally_line(name: str, tally: Tally) -> str:
    """Return a target's tally as a line of a table."""
    return (
        f"{name:<22} {tally.runs:>8,} runs {tally.refused:>8,} refused {len(tally.crashes):>4} crashes "
        f"{len(tally.hangs):>3} hangs {tally.growth_nbytes >> 20:>6,} MiB {tally.seconds:>6.1f} s"
    )


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz.run", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=100_000, help="in all, or of the targets that are named")
    parser.add_argument("--target", action="append", default=[], help="only this one; may be given again")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--show", type=int, help="input of this number of the one target")
    options = parser.parse_args()
    targets = all_targets()
    unknown = sorted(set(options.target) - targets.keys())
    if unknown:
        parser.error(f"there is no target {unknown[0]}; the targets are {', '.join(targets)}")
    chosen = [targets[name] for name in options.target] or list(targets.values())
    if options.show is not None:
        return show(chosen[0], options.seed, options.show)
    total, shares = options.runs, sum(target.share for target in chosen)

    def one(target: Target) -> tuple[Target, Tally]:
        tally = fuzz(target, runs=max(1, total * target.share // shares), seed=options.seed)
        print(tally_line(target.name, tally), flush=True)
        for kind, found in (("crash", tally.crashes), ("hang", tally.hangs)):
            for index, what in found[:5]:
                print(f"    {kind} in input {index}: {what}", flush=True)
        return target, tally

    with ThreadPoolExecutor(options.jobs) as pool:
        done = list(pool.map(one, chosen))
    crashes, hangs = (sum(len(getattr(tally, kind)) for _, tally in done) for kind in ("crashes", "hangs"))
    growth = max(tally.growth_nbytes for _, tally in done) >> 20
    runs, refused = sum(tally.runs for _, tally in done), sum(tally.refused for _, tally in done)
    print(
        f"fuzz: {runs:,} inputs, {len(done)} targets: {refused:,} refused, {crashes} crashes, {hangs} hangs over 1 s, "
        f"at most {growth:,} MiB more memory in a process"
    )
    return int(bool(crashes or hangs))


def show(target: Target, seed: int, index: int) -> int:
    """Write an input to ``report/fuzz`` and parse it in this process."""
    from tests.fuzz.worker import input_of

    folder = Path("report/fuzz") / f"{target.name}-{index}"
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as work:
        case = target.prepare(Path(work))
        made = input_of(target, case.seeds, case.words, seed, index)
        write_folder({"input": made} if isinstance(made, bytes) else made, folder)
        print(f"written to {folder}")
        case.parse(made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
