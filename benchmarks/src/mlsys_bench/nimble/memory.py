"""Measure the memory that a prepared model keeps, and gives back, beside ONNX Runtime's.

    mlsys bench nimble-memory nets=resnet50,mobilenet-v2,bert-base

Each contestant has a fresh process. Resident memory is read after the imports, with the model, when it has answered,
and when the prepared model was deleted. A process that prepares a net has torch's module too, which ONNX Runtime's
process never had. One that loads a prepared model from its file has not: it is the like of a session over an ONNX file.
"""

from __future__ import annotations

import gc
import tempfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlsys_bench.harness.child import run_in_child
from mlsys_bench.harness.text import MISSING, rows_section

if TYPE_CHECKING:
    from mlsys_core.bench import BenchContext
    from mlsys_core.report import Section

NETS = ("resnet50", "mobilenet-v2", "bert-base")
_CALLS = 3
_ONE_THREAD = {"OMP_NUM_THREADS": "1"}


@dataclass(frozen=True, slots=True)
class Row:
    """Resident MiB of one contestant with one net."""

    net: str
    contestant: str
    weights: float  # of the module, in fp32
    beyond_module: float  # that the prepared model keeps beside what it was made of
    beyond_imports: float  # with the module, where there is one
    after_delete: float  # that stays when the prepared model is deleted, beside what it was made of
    peak: float  # of the process
    ratio: str = MISSING  # of beyond_imports, to ONNX Runtime


def resident_mib(name: str = "VmRSS") -> float:
    """Return this process's resident memory, or its peak (``VmHWM``), in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) / 1024


def nimble(net: str) -> dict[str, float]:
    """Prepare a net in this process and return what it took, in MiB."""
    import torch
    from mlsys_core.memory.trim import return_freed_memory
    from mlsys_nimble import Nimble
    from mlsys_nimble.nets.resolve import load_model

    torch.set_num_threads(1)
    imported = resident_mib()
    module, inputs = load_model(net)
    module.eval()
    with torch.inference_mode():
        module(*inputs)
    gc.collect()
    return_freed_memory()  # of torch's own run and of the weights' making: not the contestant's
    made = resident_mib()
    prepared = Nimble(module).prepare(inputs, num_threads=1)
    for _ in range(_CALLS):
        prepared(*inputs)
    kept = resident_mib()
    del prepared
    gc.collect()
    weights = sum(parameter.nbytes for parameter in module.parameters()) / 2**20
    return {
        "weights": weights,
        "beyond_module": kept - made,
        "beyond_imports": kept - imported,
        "after_delete": resident_mib() - made,
        "peak": resident_mib("VmHWM"),
    }


def save(net: str, path: str) -> dict[str, str]:
    """Prepare a net and save it, with its example inputs beside it."""
    import numpy as np
    import torch
    from mlsys_nimble import Nimble
    from mlsys_nimble.nets.resolve import load_model

    torch.set_num_threads(1)
    module, inputs = load_model(net)
    prepared = Nimble(module.eval()).prepare(inputs, num_threads=1)
    prepared(*inputs)
    prepared.save(path)
    np.savez(f"{path}.npz", *(tensor.numpy() for tensor in inputs))
    return {}


def loaded(path: str) -> dict[str, float]:
    """Load a saved model in this process and return what it took, in MiB."""
    import numpy as np
    import torch
    from mlsys_nimble import load

    torch.set_num_threads(1)
    inputs = [torch.from_numpy(array) for array in np.load(f"{path}.npz").values()]
    imported = resident_mib()
    model = load(path)
    for _ in range(_CALLS):
        model(*inputs)
    kept = resident_mib()
    del model
    return _taken(imported, kept)


def export(net: str, path: str) -> dict[str, str]:
    """Write a net as ONNX, and its example inputs beside it."""
    import numpy as np
    import torch
    from mlsys_nimble.nets.resolve import load_model

    module, inputs = load_model(net)
    torch.onnx.export(module.eval(), tuple(inputs), path, dynamo=True, verbose=False)
    np.savez(f"{path}.npz", *(tensor.numpy() for tensor in inputs))
    return {}


def onnx_runtime(path: str) -> dict[str, float]:
    """Load an ONNX file in this process and return what it took, in MiB."""
    import numpy as np
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    arrays = list(np.load(f"{path}.npz").values())
    imported = resident_mib()
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    feed = {given.name: array for given, array in zip(session.get_inputs(), arrays, strict=True)}
    for _ in range(_CALLS):
        session.run(None, feed)
    kept = resident_mib()
    del session
    return _taken(imported, kept)


def _taken(imported: float, kept: float) -> dict[str, float]:
    """Return what a model without a torch module took, which its caller has just deleted."""
    gc.collect()
    grown = kept - imported
    peak, left = resident_mib("VmHWM"), resident_mib() - imported
    return {"beyond_module": grown, "beyond_imports": grown, "after_delete": left, "peak": peak}


def run(context: BenchContext, *, nets: tuple[str, ...] = NETS) -> Section:
    """Measure the contestants on each net."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for net in nets[:1] if context.is_quick else nets:
            own = _child("nimble", net=net)
            found = {"nimble": own}
            saved = str(Path(folder) / f"{net}.nimble")
            _child("save", net=net, path=saved)
            found["nimble, loaded"] = _child("loaded", path=saved)
            if find_spec("onnxruntime") is not None:
                path = str(Path(folder) / f"{net}.onnx")
                _child("export", net=net, path=path)
                found["onnxruntime"] = _child("onnx_runtime", path=path)
            peer = found.get("onnxruntime")
            for contestant, measured in found.items():
                ratio = MISSING
                if peer is not None and measured is not peer:
                    ratio = f"{measured['beyond_imports'] / peer['beyond_imports']:.2f}x"
                rows.append(Row(net, contestant, **measured | {"weights": own["weights"]}, ratio=ratio))
    text = (
        "Resident MiB; what 'nimble' keeps beyond its imports holds torch's module too, which the others do not have."
    )
    return rows_section("Nimble: memory of a prepared model", rows, text)


def _child(function: str, **arguments: str) -> Any:
    return run_in_child(f"{__name__}:{function}", arguments, env=_ONE_THREAD)
