"""Each way in which a ``.pt2`` file can have torch run code, read files or memory, or never end; all are refused.

That the payloads are real is shown by loading the same files with ``trust_code``: there they run.
"""

from __future__ import annotations

import contextlib
import io
import json
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from mlsys_core.errors import InvalidInputError
from mlsys_core.pt2.program import load_program

Forge = Callable[..., Path]


class Payload:
    """An object that writes a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return Path.write_text, (self.marker, "ran")


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    """Return the file that appears where a payload runs."""
    return tmp_path / "marker"


def code(marker: Path) -> str:
    """Return an expression that writes ``marker``."""
    return f"__import__('pathlib').Path({str(marker)!r}).write_text('ran')"


def pickled(marker: Path) -> bytes:
    """Return a file of torch.save that writes ``marker`` when it is unpickled."""
    buffer = io.BytesIO()
    torch.save((Payload(marker),), buffer)
    return buffer.getvalue()


def refused(path: Path, says: str) -> None:
    """Require one line that says why, and how to load it all the same."""
    with pytest.raises(InvalidInputError, match=says) as caught:
        load_program(path)
    assert "\n" not in str(caught.value)
    assert "--trust-code" in str(caught.value)


def runs_where_trusted(path: Path, marker: Path) -> None:
    """Show that the payload is a real one: what is refused above would have run."""
    assert not marker.exists()
    with contextlib.suppress(Exception):  # after the payload ran, anything may be raised
        load_program(path, trust_code=True).program.module()
    assert marker.exists()


def test_sample_inputs_are_not_unpickled(forge: Forge, marker: Path):
    path = forge(members={"data/sample_inputs/model.pt": pickled(marker)})
    load_program(path).program.module()  # what is not needed is not read
    assert not marker.exists()
    runs_where_trusted(path, marker)


def test_a_pickled_weight_is_refused(forge: Forge, marker: Path):
    def use_pickle(data: Any) -> None:
        data["config"]["linear.weight"]["use_pickle"] = True

    path = forge(weights=use_pickle, members={"data/weights/weight_0": pickled(marker)})
    refused(path, "linear.weight is kept as a pickle")
    runs_where_trusted(path, marker)


@pytest.mark.parametrize("folder", ["weights", "constants"])
def test_older_files_of_pickles_are_refused(forge: Forge, marker: Path, folder: str):
    path = forge(members={f"data/{folder}/model.pt": pickled(marker)})
    refused(path, "kept tensors as a pickle")
    runs_where_trusted(path, marker)


def test_an_object_among_the_constants_is_refused(forge: Forge, marker: Path):
    def add(data: Any) -> None:
        entry = {"path_name": "opaque_obj_0", "is_param": False, "use_pickle": True, "tensor_meta": None}
        data["config"]["thing"] = entry

    path = forge(constants=add, members={"data/constants/opaque_obj_0": pickle.dumps(Payload(marker))})
    refused(path, "'opaque_obj_0' is no file of a tensor")
    runs_where_trusted(path, marker)


def graph(data: Any) -> Any:
    """Return the graph within a model's JSON."""
    return data["graph_module"]["graph"]


@pytest.mark.parametrize(
    "text",
    ["{code}", "Symbol('s0') if {code} else 1", "[{code}][0]", "s0 + {code}", "(lambda: {code})()", "s0.__class__"],
)
def test_an_expression_is_not_evaluated(forge: Forge, marker: Path, text: str):
    def change(data: Any) -> None:
        value = next(iter(graph(data)["sym_int_values"].values()))
        value.clear()
        value["as_expr"] = {"expr_str": text.format(code=code(marker)), "hint": {"as_int": 2}}

    path = forge(model=change)
    refused(path, "is not plain arithmetic of sizes")
    assert not marker.exists()
    if text == "{code}":
        runs_where_trusted(path, marker)


@pytest.mark.parametrize(
    "text",
    ["{code}", "L['mask'].size()[0] == 1, {code}", "L['mask'].__class__ == 1", "math.__loader__ == 1",
     "L['x', {code}] == 1", "L[\"a' + {code} + 'b\"] == 1"],
)  # fmt: skip
def test_a_guard_is_not_run(forge: Forge, marker: Path, text: str):
    path = forge(model=lambda data: data.update(guards_code=[text.format(code=code(marker))]))
    refused(path, "is not plain arithmetic of sizes")
    assert not marker.exists()
    if text == "{code}":  # evaluated when the guards are checked: in the first call
        with contextlib.suppress(Exception):
            saved = load_program(path, trust_code=True)
            saved.program.module()(*(saved.example_args or ()))
        assert marker.exists()


@pytest.mark.parametrize(
    "target",
    [
        "torch.os.system",
        "torch.ops.aten.__class__.mro",
        "_operator.methodcaller",
        "_operator.attrgetter",
        "math.__loader__.load_module",
        "torch.ops.aten.save.default",
        "torch.ops.aten.from_file.default",
        "torch.ops.aten.fbgemm_linear_fp16_weight.default",
        "torch.ops.aten._reshape_alias.default",
        "torch.ops.aten.set_.source_Storage_storage_offset",
        "torch.ops.aten.max_pool2d_with_indices_backward.default",
        "torch.ops.loaded_library.anything.default",
        "torch.ops.higher_order.triton_kernel_wrapper_functional",
        "torch.ops.aten.no_such_operator.default",
        "#extension:name",
        "",
    ],
)
def test_an_operator_that_does_other_than_compute_is_refused(forge: Forge, target: str):
    refused(forge(model=lambda data: graph(data)["nodes"][0].update(target=target)), "is no operator that computes")


def test_a_function_of_torch_is_not_called(forge: Forge, marker: Path):
    node = {
        "target": "torch.os.system",
        "inputs": [{"name": "", "arg": {"as_string": f"touch {marker}"}, "kind": 1}],
        "outputs": [{"as_none": True}],
        "metadata": {},
        "name": "call",
    }
    path = forge(model=lambda data: graph(data)["nodes"].insert(0, node))
    refused(path, "'torch.os.system' is no operator")
    assert not marker.exists()


@pytest.mark.parametrize("name", ["x = {code}", "a b", "x\n", "__class__", "import", "x;y", "x: {code}", ""])
def test_names_cannot_be_code(forge: Forge, marker: Path, name: str):
    """torch writes the names of values into the Python text that it then runs."""

    def rename(data: Any) -> None:
        text = json.dumps(data).replace('"mask"', json.dumps(name.format(code=code(marker))))
        data.clear()
        data.update(json.loads(text))

    refused(forge(model=rename), "is no name of a value")
    assert not marker.exists()


@pytest.mark.parametrize("name", ['a"+{code}+"', "__class__", "a..b", 'x"]', ".", "a\\b"])
def test_names_of_weights_cannot_be_code(forge: Forge, marker: Path, name: str):
    def rename(data: Any) -> None:
        text = json.dumps(data).replace('"linear.weight"', json.dumps(name.format(code=code(marker))))
        data.clear()
        data.update(json.loads(text))

    refused(forge(model=rename, weights=rename), "is no name of a weight")
    assert not marker.exists()


@pytest.mark.parametrize(
    ("tree", "says"),
    [
        ({"type": "collections.namedtuple", "context": '"os.stat_result"', "children_spec": []}, "only code"),
        ({"type": "builtins.dict", "context": '[{"__enum__": true, "fqn": "antigravity:x", "name": "y"}]',
          "children_spec": [{"type": None, "context": None, "children_spec": []}]}, "has a dict|have a dict"),
        ({"type": "builtins.dict", "context": '["a\'+x+\'"]',
          "children_spec": [{"type": None, "context": None, "children_spec": []}]}, "have a dict"),
        ("text", "damaged"),
    ],
)  # fmt: skip
def test_structures_are_plain(forge: Forge, tree: Any, says: str):
    def change(data: Any) -> None:
        data["graph_module"]["module_call_graph"][0]["signature"]["out_spec"] = json.dumps([1, tree])

    refused(forge(model=change), says)


def test_metadata_is_not_resolved(forge: Forge, original: Path):
    def change(data: Any) -> None:
        for node in graph(data)["nodes"]:
            node["metadata"] = {"source_fn_stack": "x,torch.os.system", "from_node": "[1]", "custom": "{"}
        data["graph_module"]["metadata"] = {"custom": "{"}

    nodes = load_program(forge(model=change)).program.graph.nodes
    assert all("source_fn_stack" not in node.meta for node in nodes)


def set_in(*path: Any, value: Any) -> Callable[[Any], None]:
    """Return a change of one value within a weight's description."""

    def change(data: Any) -> None:
        node = data["config"]["linear.weight"]
        for key in path[:-1]:
            node = node[key]
        node[path[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (set_in("path_name", value="../../../etc/passwd"), "is no file of a tensor"),
        (set_in("path_name", value="weight_99"), "lacks data/weights/weight_99"),
        (set_in("tensor_meta", "sizes", 0, value={"as_int": 5}), "another type or shape"),
        (set_in("tensor_meta", "sizes", 0, value={"as_int": -4}), "another type or shape|no numbers"),
        (set_in("tensor_meta", "storage_offset", value={"as_int": 1}), "reaches past"),
        (set_in("tensor_meta", "storage_offset", value={"as_int": -1}), "no numbers"),
        (set_in("tensor_meta", "strides", 0, value={"as_int": 1 << 62}), "reaches past"),
        (set_in("tensor_meta", "strides", value=[]), "sizes and 0 strides"),
        (set_in("tensor_meta", "dtype", value=8), "another type or shape"),
        (set_in("tensor_meta", "dtype", value=77), "another type or shape|cannot rebuild"),
        (set_in("tensor_meta", "layout", value=1), "not strided"),
        (set_in("tensor_meta", "device", "type", value="cpu'+x+'"), "device .* is none of"),
        (set_in("tensor_meta", value=None), "lacks the parameter|pickle"),
        (set_in("is_param", value="yes"), "PayloadMeta.is_param is 'yes'"),
    ],
)
def test_weights_stay_within_their_bytes(forge: Forge, change: Any, says: str):
    refused(forge(weights=change), says)


def test_a_weight_without_bytes_is_refused(forge: Forge):
    refused(forge(members={"data/weights/weight_0": b""}), "reaches past its 0 elements")


def test_compressed_members_are_refused(forge: Forge):
    """A few kilobytes of zeros could else become gigabytes."""
    path = forge(members={"data/weights/weight_0": b"\0" * (1 << 24)}, compression=zipfile.ZIP_DEFLATED)
    assert path.stat().st_size < 1 << 17
    refused(path, "compressed or encrypted")


def test_members_that_overlap_are_refused(forge: Forge):
    path = forge()
    content = bytearray(path.read_bytes())
    at = content.rindex(b"PK\x01\x02")  # the directory's last entry: say that it is as large as three files
    size = (3 * len(content)).to_bytes(4, "little")
    content[at + 20 : at + 28] = size + size
    path.write_bytes(content)
    refused(path, "overlap")


def test_a_changed_byte_is_noticed(forge: Forge):
    path = forge()
    content = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        at = archive.getinfo("net/data/weights/weight_0").header_offset + 100
    content[at] ^= 1
    path.write_bytes(content)
    refused(path, "CRC|cannot be read safely")


@pytest.mark.parametrize(
    ("text", "is_allowed"),
    [
        ("Symbol('s0', positive=True, integer=True)**2", True),
        ("Pow(Symbol('s0'), Integer(2))", True),
        ("Pow(Integer(9), Integer(999999999))", False),
        ("9**9**9**9", False),
        ("Pow(Pow(Pow(Integer(9), Integer(8)), Integer(8)), Integer(8))", False),
        ("LShift(Integer(1), Integer(10000000000))", False),
        ("Add(" + ", ".join(["s0"] * 5000) + ")", False),
        ("(" * 150 + "s0" + ")" * 150, True),
        ("(" * 5000 + "s0" + ")" * 5000, False),
        (str(10**30), False),
        ("factorial(99999999)", False),
        ("Max(Integer(1), FloorDiv(Symbol('s0', positive=True, integer=True), Integer(2)))", True),
    ],
    ids=range(12),
)
def test_expressions_that_never_end_are_refused(text: str, is_allowed: bool):
    from mlsys_core.pt2.expressions import symbolic

    if is_allowed:
        symbolic(text)
    else:
        with pytest.raises(InvalidInputError, match="not plain arithmetic"):
            symbolic(text)


def test_deep_nesting_is_refused(forge: Forge):
    deep = "[" * 100_000 + "]" * 100_000
    refused(forge(members={"models/model.json": deep.encode()}), "no JSON")

    def change(data: Any) -> None:
        nested: Any = {"as_int": 1}
        for _ in range(200):
            nested = {"as_string_to_argument": {"a": nested}}
        graph(data)["nodes"][0]["inputs"][0]["arg"] = nested

    refused(forge(model=change), "nested too deeply")


def test_a_field_of_a_later_torch_that_holds_text_is_refused(forge: Forge, monkeypatch: pytest.MonkeyPatch):
    from mlsys_core.pt2 import schema

    monkeypatch.delitem(schema._RULES, "Argument.as_string")

    def change(data: Any) -> None:
        graph(data)["nodes"][0]["inputs"][0]["arg"] = {"as_string": "x"}

    refused(forge(model=change), "Argument.as_string, which could name code")
