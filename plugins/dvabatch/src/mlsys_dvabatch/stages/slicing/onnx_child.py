"""ONNX Runtime in a process of its own: its import leaves a thread behind, and who has threads cannot fork instances.

    python -m mlsys_dvabatch.stages.slicing.onnx_child FILE

reads an archive of numpy's with the arrays ``BATCH.INPUT`` from standard input and writes one with ``BATCH.OUTPUT``.
Imports no torch.
"""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Arrays = Sequence[npt.NDArray[Any]]


def answers_in_child(path: Path, batches: Sequence[Arrays]) -> list[list[npt.NDArray[Any]]] | None:
    """Run a file on batches of inputs, in the file's order of inputs.

    Returns:
        Each batch's outputs, as far as they are tensors of numbers, none where ONNX Runtime does not take the batch;
        None: it does not know an operator or a version, or has crashed.
    """
    given = _packed(
        {f"{number}.{index}": array for number, each in enumerate(batches) for index, array in enumerate(each)}
    )
    command = [sys.executable, "-m", __name__, str(path)]
    done = subprocess.run(command, input=given, capture_output=True, check=False)
    if done.returncode != 0:
        return None
    found = np.load(io.BytesIO(done.stdout), allow_pickle=False)
    numbers = [name.partition(".")[0] for name in found.files]  # in the order in which they were written
    return [
        [found[name] for name, of in zip(found.files, numbers, strict=True) if of == str(number)]
        for number in range(len(batches))
    ]


def _packed(arrays: dict[str, npt.NDArray[Any]]) -> bytes:
    file = io.BytesIO()
    np.savez(file, **arrays)  # type: ignore[arg-type]  # numpy's stub has allow_pickle among the names
    return file.getvalue()


def main(path: str) -> None:
    """Answer one archive."""
    import onnxruntime  # type: ignore[import-untyped, unused-ignore]

    given = np.load(io.BytesIO(sys.stdin.buffer.read()), allow_pickle=False)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_inputs()]
    found = {}
    for number in range(len(given) // len(names)):
        try:
            outputs = session.run(None, {name: given[f"{number}.{index}"] for index, name in enumerate(names)})
        except Exception:  # noqa: BLE001 - of many kinds: it takes no such values
            continue
        for index, value in enumerate(outputs):
            if not isinstance(value, np.ndarray) or value.dtype == np.object_:
                break
            found[f"{number}.{index}"] = value
    sys.stdout.buffer.write(_packed(found))


if __name__ == "__main__":
    main(sys.argv[1])
