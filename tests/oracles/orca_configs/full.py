"""Every field of every family's configuration at other values, beside transformers: ``full.py [CASE ...]``."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import transformers

from tests.conformance.orca.families import CASES, Case
from tests.oracles.orca_configs.changes import ENCODERS, changes
from tests.oracles.orca_configs.compare import decoder_verdict, encoder_verdict
from tests.oracles.tally import Tally

Run = Callable[[dict[str, Any]], tuple[str, str]]


def runs() -> Iterator[tuple[str, Case, Run]]:
    """Yield each case's name, the case, and what gives its verdict."""
    for name, case in CASES.items():
        yield name, case, partial(decoder_verdict, case)
    for name, case in ENCODERS.items():
        yield f"dvabatch {name}", case, partial(encoder_verdict, case)


def main(names: list[str]) -> int:
    """Print faults, reasons and the tally; return 1 if anything is wrong or raw."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    tally = Tally()
    for name, case, verdict in runs():
        if names and name not in names:
            continue
        for change in changes(case):
            found, why = verdict(change)
            tally.add(found, f"{name} {change}", "" if found == "none" else why[:120])
    print(f"{tally.counts['none']:,} more that transformers does not take")
    return tally.report("orca_configs")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
