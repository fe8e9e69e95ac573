"""Real models through Nimble: torchvision's zoo and transformers' language models, beside eager.

    python tests/oracles/nimble_zoo/full.py [--all] [--write] [--only NAME]

Classes are those that the libraries list themselves. Each language model takes a batch without padding, one padded left
and one padded right, and decoders a prompt and two tokens through a cache. Each net and model goes through ``prepare``;
some through torch.compile too, some with ``fallback="eager"``, some are trained; ``--all`` takes every model every way.
``--write`` writes docs/nimble-refusals-models.md.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import subprocess
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))
DOCS = ROOT / "docs" / "nimble-refusals-models.md"
PEER = ROOT / ".venv" / "nimble-zoo"  # torchvision without its compiled operators; see requirements/nimble-zoo.txt
NUM_PROCESSES = 2
BUDGET_S = 420  # models that are not begun by then are counted as not run, and named


def install_torchvision() -> bool:
    """Put torchvision into a folder of its own; false if that cannot be done."""
    if not (PEER / "torchvision").is_dir():
        requirements = str(ROOT / "requirements" / "nimble-zoo.txt")
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(PEER), "-r", requirements]
        subprocess.run(command, check=False)
    return (PEER / "torchvision").is_dir()


def run_share(area: str, share: int, only: str, every: bool, deadline: float, queue: Any) -> None:
    """Run every second model of one library, and send what came of it."""
    import torch

    warnings.filterwarnings("ignore")
    logging.disable(logging.ERROR)
    torch.set_num_threads(1)
    from tests.oracles.nimble_zoo.compare import Tally

    tally, left_out = Tally(), {}
    models = list(_vision() if area == "vision" else _language())
    for number, (name, run) in enumerate(models):
        if number % NUM_PROCESSES != share or only not in name:
            continue
        if time.time() > deadline:
            left_out[name] = "no time was left"
            continue
        try:
            reason = run(tally, number, every)
        except Exception as error:  # noqa: BLE001 - eager itself, or this oracle
            reason = f"eager fails: {type(error).__name__}: {str(error)[:100]}"
            traceback.print_exc(limit=2)
        if reason:
            left_out[name] = reason
        print(f"{name}: {reason or 'done'}", flush=True)
    queue.put((dict(tally.counts), tally.refused, tally.faults, left_out))


def _vision() -> Any:
    sys.path.insert(0, str(PEER))
    from tests.oracles.nimble_zoo.compare import check, check_training
    from tests.oracles.nimble_zoo.vision import Vision, define_operators, nets, too_large

    define_operators()

    def run(net: Vision, tally: Any, number: int, every: bool) -> str | None:
        reason = too_large(net)
        if reason is not None:
            return reason
        check(tally, f"{net.name}, prepare", net.make(), [net.call()], "prepare", executor="native", num_threads=1)
        if every or number % 4 == 1 or net.area == "detection":
            check(tally, f"{net.name}, fallback", net.make(), [net.call()], "eager", executor="reference")
        if every or number % 8 == 3:
            check(tally, f"{net.name}, compile", net.make(), [net.call()], "compile", executor="reference")
        if not net.area and (every or number % 16 == 5):
            check_training(tally, f"{net.name}, training", net.make(), net.call())
        return None

    for net in nets():
        yield net.name, lambda *args, net=net: run(net, *args)


def _language() -> Any:
    from tests.oracles.nimble_zoo.compare import check, check_training
    from tests.oracles.nimble_zoo.language import Language, can_be_tiny, languages, with_cache

    def run(language: Language, tally: Any, number: int, every: bool) -> str | None:
        reason = can_be_tiny(language)
        if reason is not None:
            return reason
        name, options = language.name, {"executor": "native", "num_threads": 1}
        batches = {side: [batch] for side, batch in language.batches().items()}
        for side, calls in batches.items():
            chosen = options if side == "left" else {"executor": "reference"}  # the native one takes time to measure
            check(tally, f"{name}, padded {side}", language.make(), calls, "prepare", **chosen)
        if language.is_decoder:
            check(
                tally, f"{name}, cache", language.make(), with_cache(language, "left"), "prepare", executor="reference"
            )
        if every or number % 4 == 0:
            check(tally, f"{name}, fallback", language.make(), batches["right"], "eager", executor="reference")
        if every or number % 8 == 2:
            check(tally, f"{name}, compile", language.make(), batches["left"], "compile", executor="reference")
        if every or number % 16 == 6:
            check_training(tally, f"{name}, training", language.make(), {**batches["left"][0], "use_cache": False})
        return None

    for language in languages():
        yield language.name, lambda *args, language=language: run(language, *args)


def main() -> int:
    """Run all, print the tally; 1 if something is wrong or raw."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--all", action="store_true", help="every model every way, however long it takes")
    parser.add_argument("--write", action="store_true", help="write the list of what is refused into the docs")
    parser.add_argument("--only", default="", help="models whose name has this in it")
    parser.add_argument("--area", choices=("vision", "language"), action="append")
    options = parser.parse_args()
    from tests.oracles.nimble_zoo.compare import Tally

    total, left_out = Tally(), {}
    areas = options.area or ["vision", "language"]
    if "vision" in areas and not install_torchvision():
        left_out["torchvision"] = "it cannot be installed: pip install --no-deps -r requirements/nimble-zoo.txt"
        areas.remove("vision")
    spawn = multiprocessing.get_context("spawn")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for number, area in enumerate(areas):
        queue = spawn.Queue()
        deadline = time.time() + (1e9 if options.all else BUDGET_S / len(areas))
        children = [
            spawn.Process(target=run_share, args=(area, share, options.only, options.all, deadline, queue))
            for share in range(NUM_PROCESSES)
        ]
        for child in children:
            child.start()
        for _ in children:
            counts, refused, faults, skipped = queue.get()
            total.counts.update(counts)
            total.refused.update(refused)
            total.faults += faults
            left_out.update(skipped)
        for child in children:
            child.join()
        print(f"-- {area}, {number + 1} of {len(areas)}: {total.line()}", flush=True)
    if options.write:
        DOCS.write_text(refusals(total.refused, left_out), encoding="utf-8")
    print("\n".join(total.faults))
    print(f"not run: {len(left_out)}: {', '.join(f'{name} ({why})' for name, why in sorted(left_out.items()))[:4000]}")
    print(total.line())
    return int(bool(total.faults))


def refusals(refused: dict[str, str], left_out: dict[str, str]) -> str:
    """The page of what is refused."""
    lines = [
        "# Nimble: models that are refused",
        "",
        "Made by `python tests/oracles/nimble_zoo/full.py --write` from torchvision's zoo and transformers'",
        "language models with random weights: what is refused, and why. After a comma: the way it was taken.",
        "",
        "| case | reason |",
        "| --- | --- |",
        *(f"| {name} | {why.replace('|', chr(92) + '|')} |" for name, why in sorted(refused.items())),
        "",
        "Not run:",
        "",
        *(f"- {name}: {why}" for name, why in sorted(left_out.items())),
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
