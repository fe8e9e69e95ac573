"""ONNX files of the coverage suite's sources, run in a process without WindTunnel, beside the sources' own answers.

``python -m tests.oracles.windtunnel_exports.full [EVERY]`` takes every EVERYth source. Rows are those of the suite and
hostile ones: unseen categories, missing values, empty strings, other scripts, numbers far away. Each answer is equal,
or the file (or its export) refuses with a reason; a refusal where the source answers is counted by its reason.
"""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from mlsys_bench.windtunnel.coverage.cases import estimators, pipelines
from mlsys_bench.windtunnel.coverage.suite import EXACT, distance
from mlsys_core.errors import MlsysError
from mlsys_windtunnel.convert.translation import translate
from mlsys_windtunnel.export.onnx import export_onnx
from mlsys_windtunnel.export.program import default_methods

from tests.oracles.tally import Tally

RUNNER = Path(__file__).with_name("bare.py")


def hostile(rows: Any) -> Any:
    """Return rows of the same columns that the source has not seen."""
    if not hasattr(rows, "columns"):
        rows = np.array(rows, np.float64)
        return np.concatenate([rows[:7] * 1.5 + 0.25, -rows[:3], rows[:2] * 100])
    made = rows[:12].reset_index(drop=True).copy()
    for name in made.columns:
        if made[name].dtype.kind == "f":
            made.loc[[1, 4], name] = [np.nan, 1e6]
        else:
            made[name] = made[name].astype(object)
            made.loc[[0, 2, 5, 7], name] = ["", "日本", "nan ", np.nan]
    return made


def feed_of(columns: Any, rows: Any, *, is_by_column: bool) -> Any:
    """Return the inputs of an ONNX file."""
    if not hasattr(rows, "columns"):
        rows = np.asarray(rows, np.float64)
        by_column = {each["name"]: rows[:, [each["place"]]] for each in columns}
        return by_column if is_by_column else {"X": rows}
    kinds = {"string": object, "double": np.float64, "float": np.float32, "int64": np.int64, "bool": np.bool_}
    return {each["name"]: rows[[each["name"]]].to_numpy().astype(kinds[each["type"]]) for each in columns}


def main(every: int) -> int:
    """Run all, print faults and the tally; return 1 if an answer is wrong."""
    warnings.simplefilter("ignore")
    tally = Tally()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cases = written(folder, every, tally)
        (folder / "cases.pickle").write_bytes(pickle.dumps({path: feeds for path, (feeds, _) in cases.items()}))
        subprocess.run([sys.executable, str(RUNNER)], cwd=folder, check=True)
        found = pickle.loads((folder / "found.pickle").read_bytes())
    for path, (_, wanted) in cases.items():
        for got, (where, answers) in zip(found[path], wanted, strict=True):
            verdict, detail = judged(got, answers)
            tally.add(verdict, where, detail[:140])
    return tally.report("windtunnel_exports")


def written(folder: Path, every: int, tally: Tally) -> dict[str, Any]:
    """Export all sources; return feeds and the sources' answers by file."""
    cases: dict[str, Any] = {}
    for number, case in enumerate((*pipelines(), *estimators())):
        if number % every:
            continue
        try:
            module = translate(case.source, case.rows)
        except MlsysError:
            continue
        methods = default_methods(module)
        tables = [case.rows, hostile(case.rows)]
        wanted = [(case.name, answers_of(case.source, methods, rows)) for rows in tables]
        path = folder / f"m{number}.onnx"
        try:
            export_onnx(module, path, columns=True, methods=methods)
        except MlsysError as error:
            tally.add("refused", case.name, str(error)[:140])
            continue
        except Exception as error:  # noqa: BLE001  what the oracle looks for
            tally.add("raw", case.name, f"{type(error).__name__}: {error}"[:300])
            continue
        model = onnx.load(path)
        columns = json.loads({each.key: each.value for each in model.metadata_props}["columns"])
        is_by_column = [each.name for each in model.graph.input] != ["X"]
        cases[path.name] = ([feed_of(columns, rows, is_by_column=is_by_column) for rows in tables], wanted)
    return cases


def answers_of(source: Any, methods: list[str], rows: Any) -> Any:
    """Return the source's answers, or its refusal as text."""
    try:
        return [getattr(source, method)(rows) for method in methods]
    except Exception as error:  # noqa: BLE001  third-party code
        return str(error)


def judged(got: Any, wanted: Any) -> tuple[str, str]:
    """Return a verdict and its reason."""
    if isinstance(wanted, str):
        return ("equal", "") if isinstance(got, str) else ("wrong", f"it answers where the source says {wanted[:120]}")
    if isinstance(got, str):
        return "refused", got
    apart = max(distance(other, one) for one, other in zip(got, wanted, strict=False))
    return ("equal", "") if apart <= EXACT else ("wrong", f"differs by {apart:.3g}")


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 1))
