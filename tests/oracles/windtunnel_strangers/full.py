"""All pipelines on all tables: the translation, and its files, beside the source.

``python -m tests.oracles.windtunnel_strangers.full [FILES]``: with FILES, ONNX, .pt2 and folders of each pipeline too.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mlsys_core.errors import MlsysError
from mlsys_windtunnel import translate
from mlsys_windtunnel.export.artifact import load, save
from mlsys_windtunnel.export.onnx import export_onnx, load_onnx
from mlsys_windtunnel.export.program import default_methods
from mlsys_windtunnel.export.pt2 import export_pt2, load_pt2

from tests.oracles.tally import Tally
from tests.oracles.windtunnel_estimators.compare import METHODS, compare
from tests.oracles.windtunnel_strangers.pipelines import CASES, fitted
from tests.oracles.windtunnel_strangers.tables import asked


def run(names: Iterable[str], tally: Tally, *, files: bool = False, every: int = 1) -> None:
    """Compare each pipeline's translation with it, and with ``files`` what is written of it.

    Args:
        names: Pipelines.
        tally: Verdicts.
        files: Whether ONNX, .pt2 and folders are written and asked too.
        every: Each pipeline is asked every so many-th table, another one first, and always the first three.
    """
    warnings.simplefilter("ignore")
    for number, name in enumerate(names):
        source, table = fitted(name)
        try:
            module = translate(source, table[1:6])
        except MlsysError as error:
            tally.add("refused", name, str(error)[:100])
            continue
        answering = {"": module, **(_files(module, name, tally) if files else {})}
        for place, (label, x) in enumerate(asked(table)):
            if place >= 3 and (place + number) % every:
                continue
            for kind, each in answering.items():
                methods = [method for method in METHODS if hasattr(each, method) and hasattr(source, method)]
                for method in methods[:2]:
                    compare(source, each, method, x, f"{name}.{method} {kind}, {label}", tally)


def _files(module: Any, name: str, tally: Tally) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        path, methods = Path(folder), default_methods(module)
        for kind, make in (
            ("folder", lambda: load(save(module, path / "folder"))),
            ("onnx", lambda: load_onnx(export_onnx(module, path / "m.onnx", methods=methods))),
            ("pt2", lambda: load_pt2(export_pt2(module, path / "m.pt2", methods=methods))),
        ):
            try:
                found[kind] = make()
            except MlsysError as error:
                tally.add("refused", f"{name} {kind}", f"{kind}: {str(error)[:100]}")
    return found


def main(*, files: bool) -> int:
    """Print faults, reasons and the tally; return 1 if anything is wrong or raw."""
    whole = Tally()
    for name in CASES:
        tally = Tally()
        run([name], tally, files=files)
        for fault in tally.faults:
            print(f"  {fault}", flush=True)
        whole.counts.update(tally.counts)
        whole.reasons.update(tally.reasons)
        whole.faults += tally.faults
    for reason, count in whole.reasons.most_common(40):
        print(f"{count:5} {reason}")
    print(whole.line("windtunnel_strangers"))
    return int(bool(whole.faults))


if __name__ == "__main__":
    sys.exit(main(files="FILES" in sys.argv[1:]))
