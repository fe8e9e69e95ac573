"""ONNX files: each answers what ONNX Runtime says of a request alone, or is refused by name, with a reason."""

from __future__ import annotations

import importlib.util
import logging
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from mlsys_core.errors import InvalidInputError, MissingDependencyError
from mlsys_core.loop import ServeRequest
from mlsys_dvabatch.serve.preparing import Batching, prepare
from mlsys_dvabatch.stages.slicing.onnx_child import answers_in_child
from mlsys_dvabatch.stages.slicing.onnx_file import (
    _inline_copies,
    _told,
    as_module,
    onnx_inputs,
    read_onnx,
    require_equal,
)
from mlsys_dvabatch.stages.slicing.program import load_program
from mlsys_dvabatch.stages.slicing.sliced import SlicedModel
from mlsys_dvabatch.stages.vision import UNet
from mlsys_serving.instances.chaos import ChaosServer
from mlsys_serving.processes import can_supervise
from torch import nn

onnx = pytest.importorskip("onnx")
helper, T = onnx.helper, onnx.TensorProto
needs_converter = pytest.mark.skipif(
    importlib.util.find_spec("onnx2torch") is None, reason="onnx2torch is not installed"
)
Tensors = Sequence[tuple[str, int, Sequence[int | str] | None]]
TASKS = Path("/proc/self/task")  # threads of this process
WEIGHT = np.random.default_rng(0).standard_normal((4, 3)).astype(np.float32)


def node(kind: str, *names: str, **options: Any) -> Any:
    """Return an operator; the last name is its output."""
    return helper.make_node(kind, names[:-1], names[-1:], **options)


def model_of(nodes: Sequence[Any], inputs: Tensors, outputs: Tensors, opset: int = 17, **weights: Any) -> Any:
    graph = helper.make_graph(
        list(nodes),
        "g",
        [helper.make_tensor_value_info(*each) for each in inputs],
        [helper.make_tensor_value_info(*each) for each in outputs],
        [onnx.numpy_helper.from_array(np.asarray(value), name) for name, value in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def product(batch: int | str = "n") -> Any:
    return model_of(
        [node("MatMul", "x", "w", "y")], [("x", T.FLOAT, [batch, 4])], [("y", T.FLOAT, [batch, 3])], w=WEIGHT
    )


def written(model: Any, folder: Path) -> Path:
    path = folder / "net.onnx"
    onnx.save(model, str(path))
    return path


class Product(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ torch.from_numpy(WEIGHT)


FLOAT = [("x", T.FLOAT, ["n", 4])]
REFUSED: dict[str, tuple[Any, tuple[int, ...] | None, str]] = {
    "texts": (model_of([node("Identity", "x", "y")], [("x", T.STRING, ["n", 1])], []), None, "'x' takes texts"),
    "scalar": (model_of([node("Mul", "x", "k", "y")], [*FLOAT, ("k", T.FLOAT, [])], []), None, "'k' is one number"),
    "open": (model_of([node("Relu", "x", "y")], [("x", T.FLOAT, ["n", "t", 4])], []), None, r"\(any, 4\): give"),
    "rank": (model_of([node("Relu", "x", "y")], [("x", T.FLOAT, None)], []), None, "give the shape of one request"),
    "shape": (product(), (5,), r"takes requests of shape \(4\), got \[5\]"),
    "several": (model_of([node("Add", "x", "b", "y")], [*FLOAT, ("b", T.FLOAT, ["n", 4])], []), (4,), "takes 2 inputs"),
    "batches": (
        model_of([node("Add", "x", "b", "y")], [("x", T.FLOAT, [2, 4]), ("b", T.FLOAT, [3, 4])], []),
        None,
        "here they differ: 'x' 2, 'b' 3",
    ),
    "none": (model_of([node("Identity", "k", "y")], [], [], k=WEIGHT), None, "takes no inputs"),
}


@pytest.mark.parametrize(("model", "shape", "says"), REFUSED.values(), ids=REFUSED.keys())
def test_inputs_that_no_request_can_have_are_refused_by_name(model: Any, shape: Sequence[int] | None, says: str):
    with pytest.raises(InvalidInputError, match=says) as refused:
        onnx_inputs(Path("net.onnx"), model, shape)
    assert str(refused.value).startswith("net.onnx")


def test_inputs_have_the_datatypes_and_shapes_of_the_file():
    kinds = [("a", T.INT64, ["n", 5]), ("b", T.FLOAT16, ["n", 2, 2]), ("c", T.BOOL, [1]), ("d", T.DOUBLE, ["n", 1])]
    found = onnx_inputs(Path("f"), model_of([], [*kinds, ("w", T.FLOAT, [4, 3])], [], w=WEIGHT))
    assert found.names == ("a", "b", "c", "d")  # "w" has a value
    assert [each.dtype for each in found.example] == [torch.int64, torch.float16, torch.bool, torch.float64]
    assert [tuple(each.shape) for each in found.example] == [(1, 5), (1, 2, 2), (1,), (1, 1)]
    assert found.batch == 1  # of "c"; the others take any
    open_ended = model_of([], [("x", T.FLOAT, ["n", "t", 4])], [])
    assert tuple(onnx_inputs(Path("f"), open_ended, (7, 4)).example[0].shape) == (1, 7, 4)


@pytest.mark.parametrize("batch", ["n", 1, 4, 3])
@pytest.mark.parametrize("has_runtime", [True, False])
def test_a_converted_model_that_answers_otherwise_than_onnx_is_refused(
    has_runtime: bool, batch: int | str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    if not has_runtime:
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    model = product(batch)
    path, inputs = written(model, tmp_path), onnx_inputs(tmp_path, model)
    require_equal(path, model, Product(), inputs)
    wrong: list[tuple[nn.Module, str]] = [
        (nn.Linear(4, 3), r"into another model: numbers that differ from ONNX's by up to .*\(output 'y'\)"),
        (nn.Sequential(Product(), nn.Flatten(0)), "into another model: float32 of shape"),
        (Called(lambda x: (Product()(x),) * 2), "into another model: 2 outputs for 1"),
        (Called(lambda x: Product()(x) + (len(x) > 3)), "at once than to") if batch != 4 else (nn.Identity(), "shape"),
    ]
    for module, fault in wrong:
        with pytest.raises(InvalidInputError, match=f"net.onnx.*{fault}"):
            require_equal(path, model, module, inputs)


class Called(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *given: torch.Tensor) -> Any:
        return self.function(*given)


@pytest.mark.skipif(not TASKS.is_dir(), reason="threads are counted in /proc")
def test_the_comparison_leaves_no_thread_behind_and_outlives_a_crash_of_the_runtime(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    if importlib.util.find_spec("onnxruntime") is None:
        pytest.skip("onnxruntime is not installed")
    model = product()
    path, inputs = written(model, tmp_path), onnx_inputs(tmp_path, model)
    before = {task.name for task in TASKS.iterdir()}  # those of other tests may end at any time
    require_equal(path, model, Product(), inputs)
    assert {task.name for task in TASKS.iterdir()} - before == set()
    batch = [np.ones((1, 4), np.float32)]
    found = answers_in_child(path, [batch, batch])
    assert found is not None
    np.testing.assert_allclose(np.concatenate(found), np.tile(WEIGHT.sum(0), (2, 1, 1)), rtol=1e-5)
    assert answers_in_child(tmp_path / "none.onnx", [batch]) is None
    monkeypatch.setattr("sys.executable", "/bin/false")
    require_equal(path, model, Product(), inputs)  # by onnx's own evaluator


@pytest.mark.parametrize("kind", ["ReduceSum", "NonZero"])
def test_outputs_without_a_row_for_each_request_are_refused(kind: str, tmp_path: Path):
    options = {"keepdims": 0} if kind == "ReduceSum" else {}
    number = T.FLOAT if kind == "ReduceSum" else T.INT64
    model = model_of([node(kind, "x", "y", **options)], FLOAT, [("y", number, None)])
    with pytest.raises(InvalidInputError, match=r"output 'y' is of shape .* needs a row for each request"):
        require_equal(written(model, tmp_path), model, nn.Identity(), onnx_inputs(tmp_path, model))


def test_an_operator_that_the_converter_lacks_is_told_with_what_to_do():
    said = (
        "Converter is not implemented (OperationDescription(domain='ai.onnx.ml', operation_type='Scaler', version=1))"
    )
    assert _told(NotImplementedError(said)).startswith(
        "onnx2torch does not know the operator ai.onnx.ml.Scaler (version 1)"
    )
    assert "mlsys windtunnel" in _told(NotImplementedError(said))
    assert _told(NotImplementedError('"allowzero=1" is not implemented')) == '"allowzero=1" is not implemented'


def test_onnx_needs_a_converter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "a.onnx").write_bytes(b"")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match="pip install onnx onnxruntime"):
        load_program(tmp_path / "a.onnx", (torch.ones(1, 4),))


def test_a_model_that_mixes_requests_is_refused_by_the_name_of_its_file(tmp_path: Path):
    module = Called(lambda x: x - x.mean(0, keepdim=True))
    batch = torch.export.Dim("n", min=1, max=64)
    program = torch.export.export(module, (torch.ones(2, 4),), dynamic_shapes={"given": ({0: batch},)})
    torch.export.save(program, tmp_path / "centred.pt2")
    with pytest.raises(InvalidInputError, match=r"centred\.pt2: the model mixes requests"):
        prepare(str(tmp_path / "centred.pt2"), tmp_path, Batching(policy="zero"))


def test_equal_weights_are_used_themselves(tmp_path: Path):
    """Exporters write one of several equal weights, and an Identity of it for each other: converters want weights."""
    graph = onnx.load(str(exported(UNet(4), tmp_path, torch.randn(2, 3, 32, 32)))).graph
    weights = {weight.name for weight in graph.initializer}
    assert any(each.op_type == "Identity" and each.input[0] in weights for each in graph.node)
    _inline_copies(graph)
    assert not any(each.op_type == "Identity" and each.input[0] in weights for each in graph.node)
    made = weights | {"x"} | {name for each in graph.node for name in each.output}
    assert all(name in made for each in graph.node for name in each.input if name)


def exported(module: nn.Module, folder: Path, *example: torch.Tensor, names: Sequence[str] = ("x",)) -> Path:
    """Write a file as torch.onnx.export does by default, with open batches: of opset 18 or later."""
    path = folder / "exported.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        axes = {name: {0: "n"} for name in names}
        torch.onnx.export(module.eval(), example, str(path), dynamo=False, input_names=[*names], dynamic_axes=axes)
    return path


def require_equal_rows(path: Path, *, num: int = 7) -> SlicedModel:
    """Compare a file's answers to a batch with ONNX Runtime's to each of its requests, and return the model."""
    runtime = pytest.importorskip("onnxruntime")
    model = prepare(str(path), path.parent, Batching(policy="zero", max_batch_size=8)).loaded.model
    assert isinstance(model, SlicedModel)
    rng = np.random.default_rng(7)
    draws = {
        "f": rng.standard_normal,
        "b": lambda shape: rng.random(shape) < 0.5,
        "i": lambda shape: rng.integers(0, 9, shape),
        "u": lambda shape: rng.integers(0, 9, shape),
    }
    rows = [tuple(draws[like.dtype.kind](like.shape).astype(like.dtype) for like in model.example) for _ in range(num)]
    values: Any = model.collate([ServeRequest(str(number), row) for number, row in enumerate(rows)], 1)
    with torch.inference_mode():
        for stage in range(model.num_stages):
            values = model.run(stage, values)
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    for row, found in zip(rows, model.results(values), strict=True):
        given = {each.name: value[None] for each, value in zip(session.get_inputs(), row, strict=True)}
        for own, other in zip(found if isinstance(found, tuple) else (found,), session.run(None, given), strict=True):
            assert (own.shape, own.dtype) == (other.shape[1:], other.dtype)
            np.testing.assert_allclose(own, other[0], rtol=1e-3, atol=1e-4)
    return model


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = nn.Embedding(11, 4), nn.Linear(4, 3)

    def forward(self, ids: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        mixed = self.table(ids).mean(1) + x
        return self.last(mixed), mixed.argmax(1), mixed > 0


@needs_converter
def test_files_of_torchs_exporter_are_cut(tmp_path: Path):
    torch.manual_seed(0)
    require_equal_rows(exported(UNet(4), tmp_path, torch.randn(2, 3, 32, 32)))
    ids = torch.randint(0, 11, (2, 5))
    model = require_equal_rows(exported(TwoInputs(), tmp_path, ids, torch.randn(2, 4), names=["ids", "x"]))
    assert model.input_names == ["ids", "x"]


@pytest.mark.parametrize("number", [T.FLOAT, T.DOUBLE, T.FLOAT16, T.INT32, T.INT64, T.UINT8, T.BOOL])
def test_inputs_of_each_datatype_are_taken_as_the_file_has_them(number: int, tmp_path: Path):
    nodes = [node("Cast", "x", "c", to=T.FLOAT), node("MatMul", "c", "w", "y")]
    require_equal_rows(
        written(model_of(nodes, [("x", number, ["n", 4])], [("y", T.FLOAT, ["n", 3])], w=WEIGHT), tmp_path)
    )


@needs_converter
def test_a_file_for_batches_of_one_is_cut_if_its_rows_are_independent(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        require_equal_rows(written(product(1), tmp_path))
    assert "exported for batches of 1" in caplog.text
    summed = [node("ReduceSum", "x", "axes", "s", keepdims=1), node("Sub", "x", "s", "y")]
    shaped = [node("Reshape", "x", "axes", "y")]
    for nodes, sizes, axes in ((summed, [1, 4], [0]), (shaped, [1, 2, 2], [1, 4])):
        model = model_of(nodes, [("x", T.FLOAT, sizes)], [("y", T.FLOAT, [1, 4])], axes=np.array(axes))
        path = written(model, tmp_path)
        with pytest.raises(InvalidInputError, match=r"net.onnx gives other answers to 4 requests at once than to 1"):
            as_module(read_onnx(path))
        assert require_equal_rows(path).num_stages == 1


@needs_converter
@pytest.mark.skipif(can_supervise() is not None, reason=str(can_supervise()))
def test_a_file_is_served_by_processes(tmp_path: Path):
    path = written(product(), tmp_path)
    with ChaosServer(["dvabatch", "serve", str(path), "--instances", "1"]) as server:
        tensor = {"name": "x", "shape": [2, 4], "datatype": "FP32", "data": [1.0] * 4 + [2.0] * 4}
        answer = httpx.post(
            f"{server.url}/v2/models/net/infer", json={"inputs": [tensor]}, timeout=60
        ).raise_for_status()
    np.testing.assert_allclose(answer.json()["outputs"][0]["data"], [*WEIGHT.sum(0), *2 * WEIGHT.sum(0)], rtol=1e-5)


@needs_converter
def test_unknown_operators_are_refused_by_name(tmp_path: Path):
    model = model_of([node("RandomNormalLike", "x", "y")], FLOAT, [("y", T.FLOAT, ["n", 4])])
    with pytest.raises(InvalidInputError, match=r"net.onnx.*does not know the operator RandomNormalLike"):
        as_module(read_onnx(written(model, tmp_path)))


def test_files_that_cannot_be_served_are_refused_by_name(tmp_path: Path):
    pytest.importorskip("onnxruntime")
    (tmp_path / "damaged.onnx").write_bytes(b"no model")
    with pytest.raises(InvalidInputError, match=r"damaged.onnx cannot be converted: it is no ONNX file"):
        load_program(tmp_path / "damaged.onnx")
    random = model_of([node("RandomNormalLike", "x", "y")], FLOAT, [("y", T.FLOAT, ["n", 4])])
    with pytest.raises(InvalidInputError, match=r"net.onnx.*another answer when it is asked again"):
        prepare(str(written(random, tmp_path)), tmp_path)
    unknown = model_of([node("NoSuchOperator", "x", "y")], FLOAT, [("y", T.FLOAT, ["n", 4])])
    with pytest.raises(InvalidInputError, match=r"net.onnx: ONNX Runtime refuses it: .*NoSuchOperator"):
        load_program(written(unknown, tmp_path))
    fixed = model_of([node("Mul", "x", "k", "y")], FLOAT, [("y", T.FLOAT, [3, 4])], k=np.ones((3, 1), np.float32))
    with pytest.raises(InvalidInputError, match=r"net.onnx: the model does not run with 2 requests: .*broadcast"):
        load_program(written(fixed, tmp_path))
    summed = model_of([node("ReduceSum", "x", "y", keepdims=0)], FLOAT, [("y", T.FLOAT, [])])
    with pytest.raises(InvalidInputError, match=r"net.onnx: output 'y' is of shape \[\] for 2 requests"):
        load_program(written(summed, tmp_path))
