"""ONNX files: each answers what ONNX Runtime says of a request alone, or is refused by name, with a reason."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from mlsys_core.errors import InvalidInputError, MissingDependencyError
from mlsys_core.loop import ServeRequest
from mlsys_dvabatch.serve.preparing import Batching, prepare
from mlsys_dvabatch.stages.slicing.onnx_file import (
    onnx_inputs,
)
from mlsys_dvabatch.stages.slicing.program import load_program
from mlsys_dvabatch.stages.slicing.sliced import SlicedModel
from mlsys_dvabatch.stages.vision import UNet
from torch import nn

onnx = pytest.importorskip("onnx")
helper, T = onnx.helper, onnx.TensorProto
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


class Called(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *given: torch.Tensor) -> Any:
        return self.function(*given)


def test_onnx_needs_the_runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
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


def test_files_of_torchs_exporter_run_as_one_stage(tmp_path: Path):
    torch.manual_seed(0)
    require_equal_rows(exported(UNet(4), tmp_path, torch.randn(2, 3, 32, 32)))
    ids = torch.randint(0, 11, (2, 5))
    model = require_equal_rows(exported(TwoInputs(), tmp_path, ids, torch.randn(2, 4), names=["ids", "x"]))
    assert (model.input_names, model.num_stages) == (["ids", "x"], 1)


def test_files_run_on_the_cpu(tmp_path: Path):
    gpu: Any = SimpleNamespace(torch_name="cuda:0", name="cuda:0")
    with pytest.raises(InvalidInputError, match=r"net.onnx runs in ONNX Runtime, on the CPU; export a .pt2"):
        load_program(written(product(), tmp_path), device=gpu)


def test_a_file_for_batches_of_one_runs_at_its_own_size(tmp_path: Path):
    require_equal_rows(written(product(1), tmp_path))


@pytest.mark.parametrize("number", [T.FLOAT, T.DOUBLE, T.FLOAT16, T.INT32, T.INT64, T.UINT8, T.BOOL])
def test_inputs_of_each_datatype_are_taken_as_the_file_has_them(number: int, tmp_path: Path):
    nodes = [node("Cast", "x", "c", to=T.FLOAT), node("MatMul", "c", "w", "y")]
    require_equal_rows(
        written(model_of(nodes, [("x", number, ["n", 4])], [("y", T.FLOAT, ["n", 3])], w=WEIGHT), tmp_path)
    )


def test_files_that_cannot_be_served_are_refused_by_name(tmp_path: Path):
    pytest.importorskip("onnxruntime")
    (tmp_path / "damaged.onnx").write_bytes(b"no model")
    with pytest.raises(InvalidInputError, match=r"damaged.onnx is no ONNX file"):
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
