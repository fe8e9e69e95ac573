"""Artifacts: what comes back answers the same, without scikit-learn; what is damaged or malicious is refused."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from lightgbm import LGBMClassifier
from mlsys_core.errors import InvalidInputError
from mlsys_windtunnel.convert.translation import translate
from mlsys_windtunnel.export import plain_reader
from mlsys_windtunnel.export.artifact import GRAPH_FILE, TENSORS_FILE, load, save
from mlsys_windtunnel.export.plain import Reader, Writer
from mlsys_windtunnel.modules.base import OperatorModule
from mlsys_windtunnel.modules.linear.linear import Affine
from mlsys_windtunnel.modules.network import Network, Wire
from safetensors.torch import load_file, save_file
from sklearn.compose import make_column_transformer
from sklearn.linear_model import LinearRegression, LogisticRegression, RANSACRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, OneHotEncoder, OrdinalEncoder, StandardScaler

rng = np.random.default_rng(0)
FRAME = pd.DataFrame(
    {
        "a": rng.normal(size=80),
        "b": rng.choice([1.0, 2.0, np.nan], 80),
        "c": rng.choice(["x", "y", "Zürich"], 80),
        "d": pd.Series(rng.choice(["u", None, 3], 80), dtype=object),
    }
)
LABELS = np.where(FRAME.a > 0.5, "high", np.where(FRAME.c == "x", "x", "low"))


@pytest.fixture(scope="module")
def source() -> Any:
    columns = make_column_transformer(
        (StandardScaler(), ["a"]),
        (OneHotEncoder(handle_unknown="ignore"), ["b", "c"]),
        (OrdinalEncoder(handle_unknown="use_encoded_value", unknown_value=-7), ["c"]),
    )
    return make_pipeline(columns, LogisticRegression()).fit(FRAME, LABELS)


@pytest.fixture
def artifact(source: Any, tmp_path: Path) -> Path:
    return save(translate(source), tmp_path / "artifact")


def test_a_loaded_module_answers_the_same_and_can_be_trained(source: Any, artifact: Path):
    unseen = FRAME.assign(c="never seen")
    module = load(artifact)
    for frame in (FRAME, unseen):
        assert (module.predict(frame) == source.predict(frame)).all()
        np.testing.assert_allclose(module.predict_proba(frame), source.predict_proba(frame), atol=1e-12)
    original = translate(source)
    assert module.state_dict().keys() == original.state_dict().keys()
    assert [name for name, _ in module.named_parameters()] == [name for name, _ in original.named_parameters()]
    module(torch.from_numpy(module.encode(FRAME))).square().sum().backward()
    assert any(parameter.grad.abs().sum() > 0 for parameter in module.parameters())


def test_training_survives_saving(source: Any, tmp_path: Path):
    module = translate(source)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(1.5)
    next(module.parameters()).requires_grad_(False)
    again = load(save(module, tmp_path))
    np.testing.assert_array_equal(again.predict_proba(FRAME), module.predict_proba(FRAME))
    assert [p.requires_grad for p in again.parameters()] == [p.requires_grad for p in module.parameters()]


def test_a_fresh_process_loads_without_scikit_learn_or_pickle(source: Any, artifact: Path, tmp_path: Path):
    FRAME[["a", "b", "c"]].to_pickle(tmp_path / "frame.pkl")
    script = (
        "import pickle, sys, numpy as np, pandas as pd\n"
        f"frame = pd.read_pickle({str(tmp_path / 'frame.pkl')!r}).assign(d=None)\n"
        "def refused(*_, **__): raise AssertionError('pickle was used')\n"
        "from mlsys_windtunnel.export.artifact import load\n"
        "pickle.load = pickle.loads = pickle.Unpickler = refused\n"
        f"module = load({str(artifact)!r})\n"
        f"np.save({str(tmp_path / 'answer.npy')!r}, module.predict_proba(frame))\n"
        "assert 'sklearn' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
    np.testing.assert_allclose(np.load(tmp_path / "answer.npy"), source.predict_proba(FRAME), atol=1e-12)


def test_float32_and_nested_networks(tmp_path: Path):
    x = rng.normal(size=(60, 2))
    nested = make_pipeline(StandardScaler(), LinearRegression())
    source = RANSACRegressor(nested, min_samples=10, random_state=0).fit(x, x[:, 0] * 2)
    module = load(save(translate(source, dtype=torch.float32), tmp_path))
    assert module.dtype is torch.float32
    np.testing.assert_allclose(module.predict(x), source.predict(x), atol=1e-5)


def test_trees_are_saved_and_their_tables_follow_a_state_dict(tmp_path: Path):
    x = rng.normal(size=(120, 3))
    source = LGBMClassifier(n_estimators=5, num_leaves=5, verbose=-1).fit(x, x[:, 0] > 0)
    module = load(save(translate(source), tmp_path))
    np.testing.assert_allclose(module.predict_proba(x), source.predict_proba(x), atol=1e-12)
    state = module.state_dict()
    state["network.operators.0.body.threshold"] += 0.5
    original = translate(source)
    for each in (module, original):
        each.load_state_dict(state)
    np.testing.assert_array_equal(module.predict_proba(x), original.predict_proba(x))
    assert abs(module.predict_proba(x) - source.predict_proba(x)).max() > 0.01, "the tables were built anew"


def test_fallback_operators_are_refused_by_name(tmp_path: Path):
    x = rng.normal(size=(30, 2))
    source = make_pipeline(FunctionTransformer(np.cosh), LinearRegression()).fit(x, x[:, 0])
    with pytest.raises(InvalidInputError, match=r"FunctionTransformer.* cannot be saved as plain data"):
        save(translate(source, x), tmp_path / "artifact")
    assert not (tmp_path / "artifact").exists(), "refused before anything is written"


class Theirs(OperatorModule):
    """A module of a third party."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor([2.0], dtype=torch.float64))
        self.powers = {1: "one"}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x`` times the weight."""
        return x * self.weight


def test_classes_of_others_only_where_a_plugin_registers_their_converter(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    package = types.ModuleType("their_package")
    package.Theirs = Theirs
    monkeypatch.setitem(sys.modules, "their_package", package)
    monkeypatch.setattr(Theirs, "__module__", "their_package")
    module = translate(LinearRegression().fit([[0.0], [1]], [0.0, 1]))
    module.network = Network([("input", 1)], [Wire("theirs", ("input",))], {"theirs": Theirs()})
    with pytest.raises(InvalidInputError, match="their_package:Theirs"):
        save(module, tmp_path)
    with monkeypatch.context() as installed:
        installed.setattr(plain_reader, "converter_modules", lambda: frozenset({"their_package"}))
        save(module, tmp_path)
        again = load(tmp_path)
    with pytest.raises(InvalidInputError, match=r"their_package:Theirs.*no class of WindTunnel"):
        load(tmp_path)
    assert again.transform([[3.0]]).tolist() == [[6.0]]
    assert again.network.output.powers == {1: "one"}


def _edit(graph: Any, old: Any, new: Any) -> Any:
    """``graph`` with every value ``old`` replaced."""
    if graph == old:
        return new
    if isinstance(graph, dict):
        return {key: _edit(value, old, new) for key, value in graph.items()}
    return [_edit(value, old, new) for value in graph] if isinstance(graph, list) else graph


def _tuple(*items: str) -> dict[str, Any]:
    return {"$": "tuple", "items": list(items)}


_MODULES = "mlsys_windtunnel.modules"
_LINEAR = f"{_MODULES}.linear.linear"


def _classes(new: str) -> Callable[[Any], Any]:
    return lambda graph: _edit(graph, "affine", new)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda graph: [graph], "not of the format"),
        (lambda graph: graph | {"format": "other"}, "not of the format"),
        (lambda graph: graph | {"version": 99}, "version 99"),
        (lambda graph: graph | {"sha256": "0" * 64}, "damaged"),
        (lambda graph: {key: value for key, value in graph.items() if key != "network"}, "does not describe a module"),
        (lambda graph: graph | {"network": graph["frontend"]}, "does not describe a module"),
        (lambda graph: graph | {"network": {"$": "no such tag"}}, "does not describe a module"),
        (_classes("os:system"), "'os:system' is no class of WindTunnel"),
        (_classes("../../etc/passwd"), "does not match"),
        (
            _classes(f"{_LINEAR}:Missing"),
            f"no class '{_LINEAR}:Missing'",
        ),
        (_classes(f"{_MODULES}.missing:Affine"), f"no class '{_MODULES}.missing:Affine'"),
        (_classes("mlsys_windtunnel.modules.linear.linear:np.load"), "no class"),
        (_classes("mlsys_windtunnel.modules.linear.linear:torch"), "not what is needed"),
        (_classes("mlsys_windtunnel.modules.linear.linear:Tensor"), "not what is needed"),
        (_classes("no-such-type"), "no type 'no-such-type'"),
        (_classes("vocabulary"), "not what is needed"),
        (_classes("mlsys_windtunnel.host.lookup:Vocabulary"), "not what is needed"),
        (_classes("mlsys_windtunnel.modules.base:OperatorModule"), "does not run"),
        (lambda graph: _edit(graph, _tuple("columntransformer/concatenate"), _tuple("nowhere")), "does not run"),
        (lambda graph: _edit(graph, "softmax", {"$": "dict", "items": [[[1], 2]]}), "does not describe a module"),
        (lambda graph: _edit(graph, "torch.float64", "torch.int64"), "is torch.float64 of shape"),
        (lambda graph: _edit(graph, "network.operators.4.body.bias", "nowhere"), "no tensor 'nowhere'"),
        (lambda graph: _edit(graph, "network.operators.4.body.bias", "network.operators.0.shift"), "of shape"),
    ],
)
def test_a_wrong_graph_is_refused(artifact: Path, change: Callable[[Any], Any], says: str):
    graph = json.loads((artifact / GRAPH_FILE).read_text())
    changed = change(graph)
    assert changed != graph, "the change hits something"
    (artifact / GRAPH_FILE).write_text(json.dumps(changed))
    with pytest.raises(InvalidInputError, match=says):
        load(artifact)


@pytest.mark.parametrize("name", ["forward", "_parameters", "_forward_hooks", "__class__"])
def test_state_that_hides_a_method_or_hooks_is_refused(artifact: Path, name: str):
    graph = json.loads((artifact / GRAPH_FILE).read_text())
    last = graph["network"]["modules"]["operators"]["modules"]["4"]
    last["state"][name] = "x"
    (artifact / GRAPH_FILE).write_text(json.dumps(graph))
    with pytest.raises(InvalidInputError, match=f"'{name}', or cannot be given it"):
        load(artifact)


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "nonsense", '{"format": NaN}', "\u00e9"])
def test_no_json_is_refused(artifact: Path, text: str):
    (artifact / GRAPH_FILE).write_text(text, encoding="utf-8")
    with pytest.raises(InvalidInputError, match=r"no JSON|not of the format"):
        load(artifact)


def test_another_tensor_is_refused_even_with_a_matching_digest(artifact: Path):
    tensors = load_file(artifact / TENSORS_FILE)
    tensors["network.operators.4.body.bias"] = torch.zeros(1_000, dtype=torch.float64)
    save_file(tensors, artifact / TENSORS_FILE)
    graph = json.loads((artifact / GRAPH_FILE).read_text())
    graph["sha256"] = hashlib.sha256((artifact / TENSORS_FILE).read_bytes()).hexdigest()
    (artifact / GRAPH_FILE).write_text(json.dumps(graph))
    with pytest.raises(InvalidInputError, match=r"body.bias' is torch.float64 of shape \[1000\].* \[3\] is needed"):
        load(artifact)


def test_a_flipped_bit_or_a_missing_file_is_refused(artifact: Path, tmp_path: Path):
    data = bytearray((artifact / TENSORS_FILE).read_bytes())
    data[-1] ^= 1
    (artifact / TENSORS_FILE).write_bytes(data)
    with pytest.raises(InvalidInputError, match="damaged"):
        load(artifact)
    (artifact / TENSORS_FILE).unlink()
    for directory in (artifact, tmp_path / "nowhere"):
        with pytest.raises(InvalidInputError, match="is no artifact"):
            load(directory)


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        7,
        10**40,
        -0.0,
        "quoted \ud800 text",
        [1, [2.5]],
        (1, ("x",)),
        {"a": 1, "$": 2},
        {1: "one", (2, 3): None},
        frozenset({"predict", "transform"}),
        torch.float32,
        np.float32(1.5),
        np.str_("text"),
        np.datetime64("2024-02-29"),
        pd.NA,
    ],
)
def test_plain_values_come_back_as_they_were(value: Any):
    again = Reader({}).read(json.loads(json.dumps(Writer().write(value), allow_nan=False)))
    assert type(again) is type(value)
    assert again is value if value is pd.NA else again == value
    assert str(again) == str(value)


@pytest.mark.parametrize("keep_arrays", [False, True])
@pytest.mark.parametrize(
    "array",
    [
        np.array([1.5, np.nan, -np.inf]),
        np.arange(100).reshape(4, 25),
        np.zeros((0, 3)),
        np.array([2**63 + 1, 0], np.uint64),
        np.array(["a", "longer"]),
        np.array([b"a", b"bc"]),
        np.array([None, "x", 2], object),
        np.array(["2024-01-01", "NaT"], "datetime64[D]"),
        np.array([True, False]),
    ],
)
def test_arrays_come_back_as_they_were(array: np.ndarray, keep_arrays: bool):
    writer = Writer(keep_arrays=keep_arrays)
    again = Reader(writer.tensors).read(json.loads(json.dumps(writer.write(array, "array"), allow_nan=False)))
    assert again.dtype == array.dtype
    np.testing.assert_array_equal(again, array)


@pytest.mark.parametrize("value", [object(), print, lambda: None, 1j, LinearRegression()])
def test_only_plain_data_is_accepted(value: Any):
    with pytest.raises(InvalidInputError, match=r"there.0 is a .* cannot be saved"):
        Writer().write([value], "there")


def test_shared_tensors_stay_shared_and_hooks_are_refused():
    one = Affine([[1.0, 2.0]], [0.0])
    writer = Writer()
    written = writer.write(torch.nn.ModuleList([one, one]), "both")
    assert list(writer.tensors) == ["both.0.weight", "both.0.bias"]
    again = Reader(writer.tensors).read(written)
    assert again[0].weight is again[1].weight
    one.register_forward_hook(print)
    with pytest.raises(InvalidInputError, match="hooks"):
        Writer().write(one, "one")


def test_a_category_of_half_a_surrogate_pair_is_kept(tmp_path: Path):
    frame = pd.DataFrame({"word": ["a", "\ud800", "b\U0001f600"] * 20}, dtype=object)
    pipeline = make_pipeline(OneHotEncoder(), LogisticRegression()).fit(frame, np.arange(60) % 3 == 1)
    module = translate(pipeline)
    again = load(save(module, tmp_path / "artifact"))
    np.testing.assert_array_equal(again.predict_proba(frame), module.predict_proba(frame))
