"""The messages of the protocol's gRPC service, made from one table of names and numbers: no tool generates code.

They live in a descriptor pool of their own, so that a client's generated messages may be in the same process.
"""

from __future__ import annotations

import re
from functools import cache
from types import SimpleNamespace
from typing import Any

from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

PACKAGE = "inference"
SERVICE = "inference.GRPCInferenceService"

# Message -> "number type name" for each field. "type*" is repeated, "type%" the value of a map from strings, "type|"
# one of a choice. Types that are no scalars are messages of this table; nested ones have a dot in their names.
_TABLE: dict[str, str] = {
    "ServerLiveRequest": "",
    "ServerLiveResponse": "1 bool live",
    "ServerReadyRequest": "",
    "ServerReadyResponse": "1 bool ready",
    "ModelReadyRequest": "1 string name, 2 string version",
    "ModelReadyResponse": "1 bool ready",
    "ServerMetadataRequest": "",
    "ServerMetadataResponse": "1 string name, 2 string version, 3 string* extensions",
    "ModelMetadataRequest": "1 string name, 2 string version",
    "ModelMetadataResponse": "1 string name, 2 string* versions, 3 string platform, "
    "4 ModelMetadataResponse.TensorMetadata* inputs, 5 ModelMetadataResponse.TensorMetadata* outputs",
    "ModelMetadataResponse.TensorMetadata": "1 string name, 2 string datatype, 3 int64* shape",
    "InferParameter": "1 bool| bool_param, 2 int64| int64_param, 3 string| string_param, 4 double| double_param, "
    "5 uint64| uint64_param",
    "InferTensorContents": "1 bool* bool_contents, 2 int32* int_contents, 3 int64* int64_contents, "
    "4 uint32* uint_contents, 5 uint64* uint64_contents, 6 float* fp32_contents, 7 double* fp64_contents, "
    "8 bytes* bytes_contents",
    "ModelInferRequest": "1 string model_name, 2 string model_version, 3 string id, 4 InferParameter% parameters, "
    "5 ModelInferRequest.InferInputTensor* inputs, 6 ModelInferRequest.InferRequestedOutputTensor* outputs, "
    "7 bytes* raw_input_contents",
    "ModelInferRequest.InferInputTensor": "1 string name, 2 string datatype, 3 int64* shape, "
    "4 InferParameter% parameters, 5 InferTensorContents contents",
    "ModelInferRequest.InferRequestedOutputTensor": "1 string name, 2 InferParameter% parameters",
    "ModelInferResponse": "1 string model_name, 2 string model_version, 3 string id, 4 InferParameter% parameters, "
    "5 ModelInferResponse.InferOutputTensor* outputs, 6 bytes* raw_output_contents",
    "ModelInferResponse.InferOutputTensor": "1 string name, 2 string datatype, 3 int64* shape, "
    "4 InferParameter% parameters, 5 InferTensorContents contents",
    "ModelStreamInferResponse": "1 string error_message, 2 ModelInferResponse infer_response",
    "ModelConfigRequest": "1 string name, 2 string version",
    "ModelConfigResponse": "1 ModelConfig config",
    "ModelConfig": "1 string name, 2 string platform, 4 int32 max_batch_size, 5 ModelInput* input, "
    "6 ModelOutput* output, 14 ModelParameter% parameters, 17 string backend, "
    "19 ModelTransactionPolicy model_transaction_policy",
    "ModelInput": "1 string name, 2 DataType data_type, 4 int64* dims, 8 bool optional",
    "ModelOutput": "1 string name, 2 DataType data_type, 3 int64* dims",
    "ModelParameter": "1 string string_value",
    "ModelTransactionPolicy": "1 bool decoupled",
    "ModelStatisticsRequest": "1 string name, 2 string version",
    "ModelStatisticsResponse": "1 ModelStatistics* model_stats",
    "ModelStatistics": "1 string name, 2 string version, 3 uint64 last_inference, 4 uint64 inference_count, "
    "5 uint64 execution_count, 6 InferStatistics inference_stats, 7 InferBatchStatistics* batch_stats, "
    "8 MemoryUsage* memory_usage",
    "InferStatistics": "1 StatisticDuration success, 2 StatisticDuration fail, 3 StatisticDuration queue, "
    "4 StatisticDuration compute_input, 5 StatisticDuration compute_infer, 6 StatisticDuration compute_output, "
    "7 StatisticDuration cache_hit, 8 StatisticDuration cache_miss",
    "InferBatchStatistics": "1 uint64 batch_size, 2 StatisticDuration compute_input, "
    "3 StatisticDuration compute_infer, 4 StatisticDuration compute_output",
    "StatisticDuration": "1 uint64 count, 2 uint64 ns",
    "MemoryUsage": "1 string type, 2 int64 id, 3 uint64 byte_size",
    "ModelRepositoryParameter": "1 bool| bool_param, 2 int64| int64_param, 3 string| string_param, "
    "4 bytes| bytes_param",
    "RepositoryIndexRequest": "1 string repository_name, 2 bool ready",
    "RepositoryIndexResponse": "1 RepositoryIndexResponse.ModelIndex* models",
    "RepositoryIndexResponse.ModelIndex": "1 string name, 2 string version, 3 string state, 4 string reason",
    "RepositoryModelLoadRequest": "1 string repository_name, 2 string model_name, "
    "3 ModelRepositoryParameter% parameters",
    "RepositoryModelLoadResponse": "",
    "RepositoryModelUnloadRequest": "1 string repository_name, 2 string model_name, "
    "3 ModelRepositoryParameter% parameters",
    "RepositoryModelUnloadResponse": "",
}

# In order of their numbers, from 0.
_DATA_TYPES = (
    *("INVALID", "BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64"),
    *("FP16", "FP32", "FP64", "STRING", "BF16"),
)

_SCALARS = {
    name: getattr(FieldDescriptorProto, f"TYPE_{name.upper()}")
    for name in ("bool", "int32", "int64", "uint32", "uint64", "float", "double", "string", "bytes")
}
_FIELD = re.compile(r"(\d+) ([\w.]+)([*%|]?) (\w+)")


@cache
def messages() -> Any:
    r"""Return a namespace with the class of each top-level message: ``messages().ModelInferRequest``.

    Example:
        >>> messages().ServerLiveResponse(live=True).SerializeToString()
        b'\x08\x01'
    """
    pool = DescriptorPool()
    pool.Add(_file())
    return SimpleNamespace(
        **{name: GetMessageClass(pool.FindMessageTypeByName(f"{PACKAGE}.{name}")) for name in _TABLE if "." not in name}
    )


def _file() -> FileDescriptorProto:
    file = FileDescriptorProto(name="mlsys/open_inference.proto", package=PACKAGE, syntax="proto3")
    enum = file.enum_type.add(name="DataType")
    for number, name in enumerate(_DATA_TYPES):
        enum.value.add(name=f"TYPE_{name}", number=number)
    found: dict[str, DescriptorProto] = {}
    for name, fields in _TABLE.items():
        outer, _, inner = name.rpartition(".")
        message = found[name] = found[outer].nested_type.add(name=inner) if outer else file.message_type.add(name=inner)
        for number, kind, mark, field_name in _FIELD.findall(fields):
            _add_field(message, name, int(number), kind, mark, field_name)
    return file


def _add_field(message: DescriptorProto, path: str, number: int, kind: str, mark: str, name: str) -> None:
    is_many = mark in ("*", "%")
    field = message.field.add(
        name=name,
        number=number,
        label=FieldDescriptorProto.LABEL_REPEATED if is_many else FieldDescriptorProto.LABEL_OPTIONAL,
    )
    if mark == "%":
        entry = message.nested_type.add(name=f"{name.title().replace('_', '')}Entry")
        entry.options.map_entry = True
        _add_field(entry, f"{path}.{entry.name}", 1, "string", "", "key")
        _add_field(entry, f"{path}.{entry.name}", 2, kind, "", "value")
        kind = f"{path}.{entry.name}"
    if kind in _SCALARS:
        field.type = _SCALARS[kind]
    else:
        field.type = FieldDescriptorProto.TYPE_ENUM if kind == "DataType" else FieldDescriptorProto.TYPE_MESSAGE
        field.type_name = f".{PACKAGE}.{kind}"
    if mark == "|":
        if not message.oneof_decl:
            message.oneof_decl.add(name="parameter_choice")
        field.oneof_index = 0
