"""Fuzz one target guided by coverage, where atheris is installed: ``python -m tests.fuzz.coverage chat-template``.

Arguments after the target are libFuzzer's: ``-max_total_time=60``. A finding ends the run and is written to a file.
"""

from __future__ import annotations

import importlib
import sys
import tempfile
from pathlib import Path
from random import Random
from typing import Any

from mlsys_core.errors import MlsysError

from tests.fuzz.mutate import mutated
from tests.fuzz.target import Input, all_targets


def main() -> int:
    """Run the command line."""
    try:
        atheris: Any = importlib.import_module("atheris")
    except ImportError:
        print("atheris is not installed: pip install atheris", file=sys.stderr)
        return 2
    targets = all_targets()
    if len(sys.argv) < 2 or sys.argv[1] not in targets:
        print(f"give one of {', '.join(targets)}", file=sys.stderr)
        return 2
    name = sys.argv.pop(1)
    with tempfile.TemporaryDirectory() as work:
        atheris.enabled_hooks.add("str")
        with atheris.instrument_imports(include=["mlsys_core", "mlsys_orca", "mlsys_windtunnel", "mlsys_batchmaker"]):
            case = targets[name].prepare(Path(work))

        def one(data: bytes) -> None:
            if isinstance(case.seeds[0], bytes) and len(data) > 8:
                made: Input = data
            else:  # a folder: the bytes choose the mutation
                made = mutated(case.seeds, case.words, Random(data))
            try:
                case.parse(made)
            except MlsysError:
                return

        corpus = Path(work) / "corpus"
        corpus.mkdir()
        for index, seed in enumerate(case.seeds):
            if isinstance(seed, bytes):
                (corpus / str(index)).write_bytes(seed)
        atheris.Setup([sys.argv[0], *sys.argv[1:], str(corpus)], one)
        atheris.Fuzz()
    return 0


if __name__ == "__main__":
    sys.exit(main())
