"""Cases: the source itself, WindTunnel in three forms, and the peers, each made ready for one fitted model.

A peer is imported only here, when it is its turn; what fails is an outcome of the race. Float64 engines are handed
float64 rows and float32 engines float32 rows, converted before the clock starts.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from mlsys_bench.harness.race import LeftOut
from mlsys_bench.windtunnel.workloads import Workload


@dataclass(frozen=True, slots=True)
class Subject:
    """Task that a case is made ready for."""

    workload: Workload
    num_threads: int
    folder: Path  # its own, for files


@dataclass(frozen=True, slots=True)
class Runner:
    """A case made ready for one model."""

    prepare: Callable[[Any], Any]  # raw rows to the form that it takes; not timed
    answer: Callable[[Any], Any]  # what is timed
    finish: Callable[[Any], Any] = lambda result: result  # to probabilities, for the comparison; not timed
    note: str = ""


Maker = Callable[[Subject], Runner]
REFERENCE = "source"  # case that all others are compared with
_OPSET = {"": 15, "ai.onnx.ml": 3}


def source(task: Subject) -> Runner:
    """Prepare ``predict_proba`` of the fitted estimator."""
    return Runner(_as_is, task.workload.source.predict_proba)


def source_on_one_thread(task: Subject) -> Runner:
    """Prepare a forest on one thread: for few rows its thread pool costs more than it brings."""
    if "RandomForest" not in type(task.workload.source).__name__ or task.num_threads == 1:
        raise LeftOut("measured for the forest, whose own threads cost much for one row")
    forest = copy.copy(task.workload.source)
    forest.n_jobs = 1
    return Runner(_as_is, forest.predict_proba)


def booster(task: Subject) -> Runner:
    """Prepare LightGBM without its scikit-learn wrapper."""
    if not hasattr(task.workload.source, "booster_"):
        raise LeftOut("the source is no single LightGBM model")
    model = task.workload.source.booster_
    return Runner(_as_is, lambda x: model.predict(x, num_threads=task.num_threads))


def windtunnel(task: Subject) -> Runner:
    """Prepare the translated module, raw rows to probabilities."""
    from mlsys_windtunnel.convert.translation import translate

    return Runner(_as_is, translate(task.workload.source).predict_proba)


def windtunnel_columns(task: Subject) -> Runner:
    """Prepare the translated module for arrays by column name, as ONNX Runtime is given a pipeline's input."""
    from mlsys_windtunnel.convert.translation import translate

    if not task.workload.is_pipeline:
        raise LeftOut("the table is one array")
    return Runner(lambda x: {name: x[name].to_numpy() for name in x}, translate(task.workload.source).predict_proba)


def windtunnel_network(task: Subject) -> Runner:
    """Prepare only the tensor part, in torch: the packed table to the last operator's scores."""
    import torch
    from mlsys_windtunnel.convert.translation import translate

    module = translate(task.workload.source)
    predictor = module.predictor
    assert predictor is not None  # every source of this suite is a classifier

    def answer(x: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            scores: torch.Tensor = module.network(x)
        return scores

    def finish(scores: torch.Tensor) -> Any:
        return predictor.probabilities(scores).detach().numpy()

    return Runner(lambda x: torch.from_numpy(module.encode(x)), answer, finish)


def windtunnel_onnx(task: Subject) -> Runner:
    """Prepare WindTunnel's own ONNX file in float64, with its host part, run by onnxruntime."""
    from mlsys_windtunnel.convert.translation import translate
    from mlsys_windtunnel.export.onnx import export_onnx, load_onnx

    path = export_onnx(translate(task.workload.source), task.folder / "windtunnel.onnx", methods=["predict_proba"])
    return Runner(_as_is, load_onnx(path, num_threads=task.num_threads).predict_proba)


def onnxruntime(task: Subject) -> Runner:
    """Prepare ONNX Runtime on the file of skl2onnx and onnxmltools; a pipeline takes an input for each column."""
    to_onnx = _package("skl2onnx").to_onnx
    types = _package("skl2onnx.common.data_types")
    if "lightgbm" in str(type(_last(task.workload.source))):
        _register_lightgbm()
    if task.workload.is_pipeline:
        columns = {
            name: types.StringTensorType([None, 1]) if name in task.workload.words else types.FloatTensorType([None, 1])
            for name in task.workload.table.columns
        }
    else:
        columns = {"x": types.FloatTensorType([None, task.workload.table.shape[1]])}
    options = {id(task.workload.source): {"zipmap": False}}
    model = to_onnx(task.workload.source, initial_types=list(columns.items()), options=options, target_opset=_OPSET)
    session = _session(model.SerializeToString(), task.num_threads)

    def prepare(x: Any) -> Any:
        if not task.workload.is_pipeline:
            return {"x": x.astype(np.float32)}
        return {name: x[[name]].to_numpy(object if name in task.workload.words else np.float32) for name in columns}

    return Runner(prepare, lambda x: session.run(None, x)[1], note="float32")


def hummingbird(backend: Literal["torch", "torch.jit"]) -> Maker:
    """Return a maker of Hummingbird with one of its backends."""

    def make(task: Subject) -> Runner:
        convert = _package("hummingbird.ml").convert
        prepare = _as_is if task.workload.is_pipeline else _float32
        example = prepare(task.workload.table[:100])
        container = convert(task.workload.source, backend, example, extra_config={"n_threads": task.num_threads})
        return Runner(prepare, container.predict_proba, note="float32")

    return make


def treelite(task: Subject) -> Runner:
    """Prepare Treelite's general interpreter of trees (GTIL)."""
    model = _treelite_model(task.workload)
    predict = _package("treelite").gtil.predict
    return Runner(_as_is, lambda x: predict(model, x, nthread=task.num_threads))


def tl2cgen(task: Subject) -> Runner:
    """Prepare trees compiled to C by tl2cgen; the table is wrapped in its DMatrix before the clock starts."""
    package = _package("tl2cgen")
    model = _treelite_model(task.workload)
    if sum(tree.tree_.node_count for tree in getattr(task.workload.source, "estimators_", ())) > MOST_NODES_TO_COMPILE:
        raise LeftOut("trees so large take a compiler many minutes")
    library = task.folder / "trees.so"
    package.export_lib(model, toolchain="gcc", libpath=library, params={"parallel_comp": 16})
    predictor = package.Predictor(str(library), nthread=task.num_threads)
    return Runner(lambda x: package.DMatrix(x), predictor.predict)


MOST_NODES_TO_COMPILE = 100_000  # of which a compiler makes machine code in minutes
MAKERS: dict[str, Maker] = {
    REFERENCE: source,
    "source, 1 thread": source_on_one_thread,
    "LightGBM booster": booster,
    "WindTunnel": windtunnel,
    "WindTunnel columns": windtunnel_columns,
    "WindTunnel network": windtunnel_network,
    "WindTunnel ONNX": windtunnel_onnx,
    "ONNX Runtime": onnxruntime,
    "Hummingbird torch": hummingbird("torch"),
    "Hummingbird jit": hummingbird("torch.jit"),
    "treelite GTIL": treelite,
    "tl2cgen": tl2cgen,
}


def _as_is(x: Any) -> Any:
    return x


def _float32(x: Any) -> Any:
    return x.astype(np.float32)


def _package(name: str) -> Any:
    return importlib.import_module(name)


def _last(model: Any) -> Any:
    return model.steps[-1][1] if hasattr(model, "steps") else model


def _session(model: bytes, num_threads: int) -> Any:
    runtime = _package("onnxruntime")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = num_threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3  # errors
    return runtime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def _register_lightgbm() -> None:
    """Tell skl2onnx of onnxmltools' converter."""
    shapes = _package("skl2onnx.common.shape_calculator").calculate_linear_classifier_output_shapes
    convert = _package("onnxmltools.convert.lightgbm.operator_converters.LightGbm").convert_lightgbm
    options = {"nocl": [True, False], "zipmap": [True, False]}
    model = _package("lightgbm").LGBMClassifier
    _package("skl2onnx").update_registered_converter(model, "LightGbmLGBMClassifier", shapes, convert, options=options)


def _treelite_model(workload: Workload) -> Any:
    is_linear = hasattr(workload.source, "coef_")
    if workload.is_pipeline or is_linear:
        raise LeftOut("it takes trees alone")
    package = _package("treelite")
    if hasattr(workload.source, "booster_"):
        return package.frontend.from_lightgbm(workload.source.booster_)
    return package.sklearn.import_model(workload.source)
