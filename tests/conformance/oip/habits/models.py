"""Configurations of the models that both servers have: a text each, in Triton's format, and what only Triton needs."""

from __future__ import annotations

from pathlib import Path

# Triton's python has no numpy for BF16: a model of its own, "bfloat", passes it through DLPack.
DATATYPES = [
    "BOOL",
    *(f"{kind}{bits}" for kind in ("UINT", "INT") for bits in (8, 16, 32, 64)),
    *("FP16", "FP32", "FP64", "BYTES"),
]


def _tensors(kind: str, *tensors: tuple[str, str, list[int]], more: str = "") -> str:
    entries = []
    for name, datatype, dims in tensors:
        entries.append(
            f'{{ name: "{name}" data_type: TYPE_{"STRING" if datatype == "BYTES" else datatype} dims: {dims}{more} }}'
        )
    return f"{kind} [ {', '.join(entries)} ]\n"


_CALLS = _tensors("input", ("x", "FP32", [1])) + _tensors("output", ("calls", "INT32", [1]))

CONFIGS: dict[str, str] = {
    "add": "max_batch_size: 8\n"
    + _tensors("input", ("a", "FP32", [-1]))
    + _tensors("input", ("b", "FP32", [-1]), more=" optional: true")
    + _tensors("output", ("sum", "FP32", [-1])),
    "upper": "max_batch_size: 4\n"
    + _tensors("input", ("text_input", "BYTES", [1]))
    + _tensors("output", ("text_output", "BYTES", [1])),
    "echo": _tensors("input", *((name.lower(), name, [-1, -1]) for name in DATATYPES), more=" optional: true")
    + _tensors("output", *((f"{name.lower()}_out", name, [-1, -1]) for name in DATATYPES)),
    "repeat": _tensors("input", ("text", "BYTES", [1]))
    + _tensors("input", ("times", "INT32", [1]), more=" optional: true")
    + _tensors("output", ("word", "BYTES", [1]), ("index", "INT32", [1]))
    + "model_transaction_policy { decoupled: true }\n",
    "bfloat": "max_batch_size: 4\n" + _tensors("input", ("x", "BF16", [-1])) + _tensors("output", ("y", "BF16", [-1])),
    "broken": _tensors("input", ("x", "FP32", [-1])) + _tensors("output", ("y", "FP32", [-1])),
    "accumulate": _tensors("input", ("frame", "INT64", [-1, 1])) + _tensors("output", ("sum", "INT64", [-1, 1])),
    "versioned": _tensors("input", ("x", "FP32", [1])) + _tensors("output", ("version", "INT32", [1])),
    "slow": "max_batch_size: 1\n" + _CALLS,
}
VERSIONS = {"versioned": ("1", "2", "10")}
# Settings that both servers read, beside the tensors.
SETTINGS = {
    "slow": """dynamic_batching {
  default_queue_policy { default_timeout_microseconds: 20000000 allow_timeout_override: true }
}
""",
}

# What a file for Triton needs beside them.
_ONLY_TRITON = {
    "versioned": "version_policy { all {} }\n",
    "accumulate": """sequence_batching {
  max_sequence_idle_microseconds: 60000000
  control_input [
    { name: "START" control { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } },
    { name: "CORRID" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 } }
  ]
}
""",
}


def write_triton_repository(root: Path) -> None:
    """Write Triton's model repository, with ``triton_model.py`` as each model's code."""
    code = Path(__file__).with_name("triton_model.py").read_text()
    for name, config in CONFIGS.items():
        folder = root / name
        for version in VERSIONS.get(name, ("1",)):
            (folder / version).mkdir(parents=True)
            (folder / version / "model.py").write_text(code)
        if name == "add":
            config = config.replace('name: "sum"', 'name: "sum" label_filename: "labels.txt"')
            (folder / "labels.txt").write_text("zero\none\ntwo\n")
        instances = 4 if name == "accumulate" else 1  # each holds one sequence
        config += f"instance_group [ {{ count: {instances} kind: KIND_CPU }} ]\n"
        head = f'name: "{name}"\nbackend: "python"\n'
        (folder / "config.pbtxt").write_text(head + config + SETTINGS.get(name, "") + _ONLY_TRITON.get(name, ""))
