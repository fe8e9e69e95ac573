"""Exports of drawn nets answer what ONNX Runtime says of each request, by the file's own names, whoever wrote them."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mlsys_core.errors import InvalidInputError
from mlsys_dvabatch.cli.explain import explain
from mlsys_dvabatch.cli.profile_report import report
from mlsys_dvabatch.serve.instances import instance_group
from mlsys_dvabatch.serve.preparing import Batching, prepare
from mlsys_dvabatch.serve.spec import wire_form
from mlsys_serving.isolation.halves import run_in_halves
from rich.console import Console
from torch import Tensor, nn

onnx = pytest.importorskip("onnx")
runtime = pytest.importorskip("onnxruntime")
WIDTH = 8
LEGACY: Any = {"dynamo": False, "fixed": False}
LAYERS = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "gelu": nn.GELU,
    "norm": lambda: nn.LayerNorm(WIDTH),
    "group": lambda: Rows(nn.GroupNorm(2, WIDTH)),
    "softmax": lambda: nn.Softmax(-1),
    "topk": lambda: Called(lambda x: x.topk(WIDTH, 1)[0]),
    "reshape": lambda: Called(lambda x: x.reshape(x.shape[0], 2, 4).transpose(1, 2).reshape(x.shape[0], WIDTH)),
    "attention": lambda: Rows(nn.TransformerEncoderLayer(2, 1, 4, batch_first=True), 4, 2),
    "convolution": lambda: Rows(nn.Sequential(nn.Conv1d(2, 2, 3, padding=1), nn.Upsample(scale_factor=2)), 2, 4, -1),
    "lstm": lambda: Called(Recurrent()),
}


class Called(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(2, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x.reshape(x.shape[0], 4, 2))[0][:, -1]


class Rows(nn.Module):
    """Give each row another shape to a layer."""

    def __init__(self, layer: nn.Module, *shape: int) -> None:
        super().__init__()
        self.layer, self.shape = layer, shape or (WIDTH,)

    def forward(self, x: Tensor) -> Tensor:
        shape = self.shape[:2]
        return self.layer(x.reshape(x.shape[0], *shape)).reshape(x.shape[0], -1)[:, :WIDTH]


class Net(nn.Module):
    """Layers over floats, or over floats and ids; several outputs where ``is_split``."""

    def __init__(self, layers: Sequence[str], *, has_ids: bool, is_split: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(LAYERS[name]() for name in layers))
        self.table = nn.Embedding(9, WIDTH) if has_ids else None
        self.is_split = is_split

    def forward(self, x: Tensor, ids: Tensor | None = None) -> Any:
        if self.table is not None:
            x = x + self.table(ids).sum(1)
        found = self.layers(x)
        return (found, found.argmax(1), found > 0) if self.is_split else found


def exported(net: nn.Module, path: Path, inputs: tuple[Tensor, ...], names: list[str], *, dynamo: bool, fixed: bool):
    """Write a file by one of torch's exporters."""
    axes: dict[str, Any] = {}
    if not fixed and dynamo:
        axes = {"dynamic_shapes": tuple({0: torch.export.Dim("batch", min=1, max=64)} for _ in inputs)}
    elif not fixed:
        axes = {"dynamic_axes": {name: {0: "batch"} for name in names}}
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        options: Any = {"verbose": False, "external_data": False} if dynamo else {}
        torch.onnx.export(net, inputs, str(path), input_names=names, dynamo=dynamo, **options, **axes)


def require_served(path: Path, at_once: int | None = None, num: int = 5) -> Any:
    """Compare a file's answers with ONNX Runtime's to single requests, or to parts that the file takes."""
    prepared = prepare(str(path), path.parent, Batching(policy="zero", max_batch_size=8))
    form, staged = wire_form(prepared.loaded, max_batch_size=8), prepared.loaded.model
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_inputs()]
    assert [each.name for each in form.spec.inputs] == names
    assert [each.name for each in form.spec.outputs] == [each.name for each in session.get_outputs()]
    rng, given = np.random.default_rng(1), {}
    for each in form.spec.inputs:
        shape = (num, *each.shape[1:])
        drawn = rng.standard_normal(shape) if each.datatype.is_floating else rng.integers(0, 2, shape)
        given[each.name] = drawn.astype(each.datatype.dtype)
    rows = form.wire.payloads(given, num)
    for row in rows:
        staged.check(row)
    with torch.inference_mode():
        answers = staged.answers(rows)
    for number, answer in enumerate(answers):
        whole = {name: np.concatenate([array[number : number + 1]] * (at_once or 1)) for name, array in given.items()}
        expected = [value[0] for value in session.run(None, whole)]
        for got, want, told in zip(answer[-len(expected) :], expected, form.spec.outputs, strict=True):
            assert (got.dtype, got.shape) == (want.dtype, want.shape) == (told.datatype.dtype, told.shape[1:])
            np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-4)
    return prepared


NAMES = st.sampled_from(["x", "X", "INPUT__0", "input.1", "serving_default_x:0", "class", "output_0", "a b"])


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.sampled_from(sorted(LAYERS)), min_size=1, max_size=3),
    st.booleans(),
    st.booleans(),
    st.lists(NAMES, min_size=2, max_size=2, unique=True),
    st.booleans(),
    st.sampled_from([None, 1, 3]),
)
def test_exports_of_torch_are_served_as_the_runtime_runs_them(layers, has_ids, is_split, names, dynamo, at_once):
    torch.manual_seed(0)
    net = Net(layers, has_ids=has_ids, is_split=is_split).eval()
    inputs = (torch.randn(at_once or 2, WIDTH), torch.ones(at_once or 2, 3, dtype=torch.int64))[: 1 + has_ids]
    with TemporaryDirectory() as folder:
        path = Path(folder) / "net.onnx"
        exported(net, path, inputs, names[: len(inputs)], dynamo=dynamo, fixed=at_once is not None)
        require_served(path, at_once)


@pytest.mark.parametrize("kind", ["linear_model:LogisticRegression", "tree:DecisionTreeClassifier", "cluster:KMeans"])
@pytest.mark.parametrize("zipmap", [True, False])
def test_pipelines_of_skl2onnx_are_served_or_refused_with_what_to_do(kind: str, zipmap: bool, tmp_path: Path):
    skl2onnx = pytest.importorskip("skl2onnx")
    module, _, name = kind.partition(":")
    model = getattr(pytest.importorskip(f"sklearn.{module}"), name)()
    x = np.random.default_rng(0).standard_normal((60, 4)).astype(np.float32)
    model.fit(x, x[:, 0] > 0)
    options = {} if name == "KMeans" else {"options": {"zipmap": zipmap}}
    model.__dict__.update(classes_=np.array([0, 1])) if name != "KMeans" else None
    (tmp_path / "m.onnx").write_bytes(skl2onnx.to_onnx(model, x[:1], **options).SerializeToString())
    if zipmap and options:
        with pytest.raises(InvalidInputError, match=r"no tensor of numbers .*zipmap"):
            require_served(tmp_path / "m.onnx")
    else:
        require_served(tmp_path / "m.onnx")


class Seldom(nn.Module):
    """Negate all where any number of the batch lies within a narrow range, which no drawn one hits."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(((x > 5.0001e4) & (x < 5.0002e4)).any(), -x, x)


def test_what_mixes_unseen_by_values_is_refused_by_every_command(tmp_path: Path):
    file = tmp_path / "net.onnx"
    exported(Seldom(), file, (torch.randn(2, WIDTH),), ["x"], **LEGACY)
    for command in (
        require_served,
        lambda path: report(str(path), tmp_path, Console()),
        lambda path: explain(str(path)),
    ):
        with pytest.raises(InvalidInputError, match=r"the operator '\w+' computes a value of several"):
            command(file)


def test_a_session_is_not_forked(tmp_path: Path):
    torch.manual_seed(0)
    net = Net(["lstm"], has_ids=False, is_split=False).eval()
    exported(net, tmp_path / "net.onnx", (torch.randn(2, WIDTH),), ["x"], **LEGACY)
    prepared = require_served(tmp_path / "net.onnx")
    with pytest.raises(InvalidInputError, match="leave out --instances"):
        instance_group(prepared, Batching(policy="zero", max_batch_size=8))


def test_a_value_that_the_runtime_does_not_take_is_its_requests_own_fault(tmp_path: Path):
    net = Net(["norm"], has_ids=True, is_split=False).eval()
    exported(net, tmp_path / "net.onnx", (torch.randn(2, 8), torch.ones(2, 3).long()), ["x", "ids"], **LEGACY)
    staged: Any = require_served(tmp_path / "net.onnx").loaded.model
    rows = [(np.ones(8, np.float32), np.full(3, id_)) for id_ in (1, 9, 2)]
    _, failed = run_in_halves(lambda at: staged.answers(rows[at.start : at.stop]), 3)
    assert [*failed] == [1]
    assert str(failed[1]).startswith("the model does not take these values: ")
