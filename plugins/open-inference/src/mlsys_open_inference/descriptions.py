"""Descriptions of the front and its models: plain dictionaries, sent as JSON or as gRPC messages alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlsys_core import __version__
from mlsys_serving.models.datatypes import DataType
from mlsys_serving.models.repository import IndexEntry
from mlsys_serving.models.spec import TensorSpec
from mlsys_serving.models.statistics import Duration
from mlsys_serving.models.version import Version

# Triton's names. Shared memory, generate, traces and logging are not among them: clients that ask for them are refused.
EXTENSIONS = (
    "binary_tensor_data",
    "classification",
    "model_configuration",
    "model_repository",
    "parameters",
    "schedule_policy",
    "statistics",
)
NO_MEMORY = "this server has no shared memory: send tensors as binary data or raw_input_contents"
NO_TRACE_SETTINGS = "this server has no trace settings: start it with --otlp-endpoint and OTEL_TRACES_SAMPLER"
NO_LOG_SETTINGS = "this server has no log settings: start it with --log-level"
NO_GENERATE = "this server has no generate: use infer, or ModelStreamInfer for any number of responses"


def server_metadata() -> dict[str, Any]:
    """Return the body of ``/v2``."""
    return {"name": "mlsys", "version": __version__, "extensions": list(EXTENSIONS)}


def model_metadata(version: Version, versions: Sequence[Version]) -> dict[str, Any]:
    """Return the body of ``/v2/models/{model}``.

    Args:
        version: the one asked for.
        versions: the model's ready versions.
    """
    return {
        "name": version.spec.name,
        "versions": [other.spec.version for other in versions],
        "platform": version.spec.platform,
        "inputs": [_tensor_metadata(tensor) for tensor in version.spec.inputs],
        "outputs": [_tensor_metadata(tensor) for tensor in version.spec.outputs],
    }


def model_config(version: Version) -> dict[str, Any]:
    """Return the body of ``/v2/models/{model}/config``: Triton's fields that mean something here."""
    spec = version.spec
    skipped = 1 if spec.max_batch_size else 0  # Triton leaves the batch dimension out
    return {
        "name": spec.name,
        "platform": spec.platform,
        "backend": "mlsys",
        "max_batch_size": spec.max_batch_size,
        "input": [
            {
                "name": tensor.name,
                "data_type": _config_type(tensor.datatype),
                "dims": list(tensor.shape[skipped:]),
                "optional": tensor.optional,
            }
            for tensor in spec.inputs
        ],
        "output": [
            {
                "name": tensor.name,
                "data_type": _config_type(tensor.datatype),
                "dims": list(tensor.shape[skipped:]),
            }
            for tensor in spec.outputs
        ],
        "parameters": {name: {"string_value": value} for name, value in spec.parameters.items()},
        "model_transaction_policy": {"decoupled": version.unary is None},
        "version_policy": {"all": {}},
    }


def model_statistics(version: Version) -> dict[str, Any]:
    """Return one element of ``model_stats`` of ``/v2/models/{model}/stats``; durations in nanoseconds."""
    statistics = version.statistics
    executions = statistics.executions()
    return {
        "name": version.spec.name,
        "version": version.spec.version,
        "last_inference": statistics.last_inference_ms,
        "inference_count": statistics.num_rows,
        "execution_count": sum(counts.count for counts in executions),
        "inference_stats": {
            "success": _duration(statistics.success),
            "fail": _duration(statistics.failure),
            "queue": _duration(statistics.queue),
            "compute_input": _duration(statistics.compute_input),
            "compute_infer": _duration(statistics.compute_infer),
            "compute_output": _duration(statistics.compute_output),
        },
        "batch_stats": [
            {
                "batch_size": counts.batch_size,
                "compute_input": {"count": counts.count, "ns": _ns(counts.compute_input_s)},
                "compute_infer": {"count": counts.count, "ns": _ns(counts.compute_infer_s)},
                "compute_output": {"count": counts.count, "ns": _ns(counts.compute_output_s)},
            }
            for counts in executions
        ],
        "memory_usage": [],
    }


def index_entry(entry: IndexEntry) -> dict[str, str]:
    """Return one element of ``/v2/repository/index``; like Triton's, without unknown fields."""
    described = {"name": entry.name}
    if entry.version:
        described["version"] = entry.version
    if entry.state is not None:
        described["state"] = entry.state.value
        if entry.reason:
            described["reason"] = entry.reason
    return described


def _tensor_metadata(tensor: TensorSpec) -> dict[str, Any]:
    return {"name": tensor.name, "datatype": tensor.datatype.value, "shape": list(tensor.shape)}


def _config_type(datatype: DataType) -> str:
    return "TYPE_STRING" if datatype is DataType.BYTES else f"TYPE_{datatype.value}"


def _duration(duration: Duration) -> dict[str, int]:
    return {"count": duration.count, "ns": _ns(duration.total_s)}


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
