"""Real models through Nimble: torchvision's zoo and transformers' language models, beside eager.

    python -m tests.oracles.nimble_zoo.full [--all] [--write] [--only NAME] [--area vision|language] [--journal FILE]

Classes are those that the libraries list themselves. Each model goes through ``prepare`` and is called with values that
it was prepared with and with others. Language models take batches padded left and at both ends, and decoders go on
token by token through a cache, of one kind for each third of them. Models in the sample go through torch.compile and
``fallback="eager"`` too, through the native executor, or are trained: which, their place in the list decides.
``--all`` takes every model every way. ``--write`` writes docs/nimble-refusals-models.md. ``--journal`` keeps what came
of each model, and a later run with the same file takes the others.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
DOCS = ROOT / "docs" / "nimble-refusals-models.md"
PEER = ROOT / ".venv" / "nimble-zoo"  # torchvision without its compiled operators; see requirements/nimble-zoo.txt
REQUIREMENTS = ROOT / "requirements" / "nimble-zoo.txt"
NUM_PROCESSES = 2
BUDGET_S = 440  # models that are not begun by then are counted as not run, and named
LIMIT_S = 60  # processor time of one model
Model = tuple[str, Callable[[Any], str | None]]  # its name, and what runs its cases


def install_torchvision() -> bool:
    """Put torchvision into a folder of its own; false if that cannot be done."""
    line = next(line for line in REQUIREMENTS.read_text().splitlines() if line.startswith("torchvision=="))
    mark = PEER / f"{line.replace('==', '-')}.dist-info" / "RECORD"
    if not mark.is_file():
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--upgrade"]
        subprocess.run([*command, "--target", str(PEER), "-r", str(REQUIREMENTS)], check=False)
    return mark.is_file()


def run_share(area: str, share: int, options: argparse.Namespace, deadline: float, queue: Any) -> None:
    """Run every second model of one library, and send what came of it."""
    import torch
    import torch._dynamo  # here once, and not in every child

    warnings.filterwarnings("ignore")
    logging.disable(logging.ERROR)
    torch.set_num_threads(1)
    from tests.oracles.journal import Journal
    from tests.oracles.nimble_zoo.children import Note, run_in_child
    from tests.oracles.nimble_zoo.compare import Tally
    from tests.oracles.nimble_zoo.page import NO_TIME

    tally, left_out, num_run = Tally(), {}, 0
    journal = Journal(options.journal)
    known = journal.read()
    models = list((vision if area == "vision" else language)(options.all))
    for number, (name, run) in enumerate(models):
        if number % NUM_PROCESSES != share or options.only not in name:
            continue
        begin = time.monotonic()
        if name in known:
            notes, reason = [Note(*note) for note in known[name][0]], known[name][1]
        elif time.time() > deadline:
            left_out[name] = NO_TIME
            continue
        else:
            notes, reason = run_in_child(name, run, LIMIT_S if not options.all else 10 * LIMIT_S)
            journal.add(name, (notes, reason))
        for note in notes:
            tally.note(*note)
        num_run += bool(notes)
        if reason:
            left_out[name] = reason
        outcomes = ", ".join(sorted({note.outcome for note in notes}))
        print(f"{name}: {outcomes} {reason or ''} ({time.monotonic() - begin:.1f} s)", flush=True)
    queue.put((tally, left_out, num_run))


def vision(takes_all: bool) -> Iterator[Model]:
    """The nets of torchvision."""
    sys.path.insert(0, str(PEER))
    from tests.oracles.nimble_zoo.compare import check, check_training
    from tests.oracles.nimble_zoo.vision import Vision, define_operators, nets, too_large

    define_operators()

    def run(net: Vision, number: int, tally: Any) -> str | None:
        if (reason := too_large(net)) is not None:
            return reason
        name, calls = net.name, net.calls()
        check(tally, f"{name}, prepare", net.make(), calls, "prepare", executor="reference")
        if takes_all or number % 12 == 1:
            check(tally, f"{name}, native", net.make(), calls, "prepare", executor="native", num_threads=1)
        if takes_all or number % 12 == 3 or (net.area == "detection" and (number % 2 or "rcnn" not in name)):
            check(tally, f"{name}, fallback", net.make(), calls, "eager", executor="reference")
        if takes_all or number % 12 == 6:
            check(tally, f"{name}, compile", net.make(), calls, "compile", executor="reference")
        if not net.area and (takes_all or number % 12 == 4):
            check_training(tally, f"{name}, training", net.make(), net.call())
        return None

    for number, net in enumerate(nets()):
        yield net.name, partial(run, net, number)


def language(takes_all: bool) -> Iterator[Model]:
    """The language models of transformers."""
    from tests.oracles.nimble_zoo.compare import check, check_training
    from tests.oracles.nimble_zoo.language import CACHES, Language, can_be_tiny, languages, with_cache

    def run(language: Language, number: int, tally: Any) -> str | None:
        if (reason := can_be_tiny(language)) is not None:
            return reason
        name, left = language.name, language.calls("left")
        check(tally, f"{name}, prepare", language.make(), left, "prepare", executor="reference")
        taken = 0
        for kind in (*CACHES[number % 3 :], *CACHES[: number % 3]) if language.has_cache else ():
            calls = with_cache(language, "left", kind) if takes_all or not taken else None
            if calls is None:
                continue
            taken += 1
            check(tally, f"{name}, {kind} cache", language.make(), calls, "prepare", executor="reference")
            if takes_all or number % 16 == 11:
                check(tally, f"{name}, {kind} cache, compile", language.make(), calls, "compile", executor="reference")
        if takes_all or number % 16 == 1:
            check(tally, f"{name}, native", language.make(), left, "prepare", executor="native", num_threads=1)
        if takes_all or number % 16 == 4:
            check(tally, f"{name}, fallback", language.make(), language.calls("right"), "eager", executor="reference")
        if takes_all or number % 16 == 6:
            check(tally, f"{name}, compile", language.make(), left, "compile", executor="reference")
        if takes_all or number % 16 == 8:
            check_training(tally, f"{name}, training", language.make(), {**left[0], "use_cache": False})
        return None

    for number, language in enumerate(languages()):
        yield language.name, partial(run, language, number)


def main() -> int:
    """Run all, print the tally; 1 if something is wrong or raw."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--all", action="store_true", help="every model every way, however long it takes")
    parser.add_argument("--write", action="store_true", help="write the list of what is refused into the docs")
    parser.add_argument("--only", default="", help="models whose name has this in it")
    parser.add_argument("--budget", type=float, default=BUDGET_S, help="seconds in which models are begun")
    parser.add_argument("--journal", help="file of what came of each model; those in it are not run again")
    parser.add_argument("--area", choices=("vision", "language"), action="append")
    options = parser.parse_args()
    from tests.oracles.nimble_zoo.compare import Tally
    from tests.oracles.nimble_zoo.page import page

    total, left_out, num_run = Tally(), {}, {}
    areas = options.area or ["language", "vision"]
    if "vision" in areas and not install_torchvision():
        left_out["torchvision"] = "it cannot be installed: pip install --no-deps -r requirements/nimble-zoo.txt"
        areas.remove("vision")
    spawn = multiprocessing.get_context("spawn")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    begin = time.time()
    for number, area in enumerate(areas, 1):
        queue = spawn.Queue()
        deadline = begin + (1e9 if options.all else options.budget * number / len(areas))
        children = [
            spawn.Process(target=run_share, args=(area, share, options, deadline, queue))
            for share in range(NUM_PROCESSES)
        ]
        for child in children:
            child.start()
        for _ in children:
            tally, skipped, count = queue.get()
            total.add(tally)
            left_out.update(skipped)
            num_run[area] = num_run.get(area, 0) + count
        for child in children:
            child.join()
        print(f"-- {area}, {number} of {len(areas)}: {total.line()}", flush=True)
    if options.write:
        DOCS.write_text(page(total, left_out, num_run, DOCS.read_text()))
    print("\n".join(total.faults))
    print(f"not run: {len(left_out)}: {', '.join(f'{name} ({why})' for name, why in sorted(left_out.items()))}")
    print(", ".join(f"{count} models of {area}" for area, count in num_run.items()), "ran")
    print(total.line())
    return int(bool(total.faults))


if __name__ == "__main__":
    sys.exit(main())
