from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from mlsys_core.loop import WallClock
from mlsys_open_inference.engine import Engine
from mlsys_open_inference.grpc.schema import COMPILED, SERVICE, messages
from mlsys_open_inference.grpc.server import REFUSED
from mlsys_open_inference.grpc.servicer import Servicer
from mlsys_serving.http import Readiness
from mlsys_serving.models import ModelRepository

triton_messages = pytest.importorskip("tritonclient.grpc.service_pb2")
triton_config = pytest.importorskip("tritonclient.grpc.model_config_pb2")


def test_values_read_are_those_of_the_proto(tmp_path: Path) -> None:
    pytest.importorskip("grpc_tools")
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I", str(COMPILED.parent), "open_inference.proto"]
    subprocess.run([*command, f"--descriptor_set_out={tmp_path / 'compiled'}"], check=True)
    ours, fresh = (FileDescriptorSet.FromString(path.read_bytes()) for path in (COMPILED, tmp_path / "compiled"))
    assert ours == fresh, "run make proto"


def fields_of(descriptor: Any) -> dict[str, tuple[Any, ...]]:
    """Return the number, type, repeatedness, choice and type name of each field of a message, by path."""
    fields = {}
    for field in descriptor.fields:
        other = field.message_type or field.enum_type
        choice = field.containing_oneof.name if field.containing_oneof else None
        fields[field.full_name] = (
            field.number,
            field.type,
            field.is_repeated,
            choice,
            other.full_name if other else None,
            bool(field.message_type and field.message_type.GetOptions().map_entry),
        )
    for nested in descriptor.nested_types:
        fields |= fields_of(nested)
    return fields


@pytest.mark.parametrize("name", sorted(vars(messages())))
def test_the_fields_are_those_of_tritons_messages(name: str) -> None:
    ours = getattr(messages(), name).DESCRIPTOR
    theirs = getattr(triton_messages, name, None) or getattr(triton_config, name)
    expected = fields_of(theirs.DESCRIPTOR)
    fields = fields_of(ours)
    assert fields == {path: expected.get(path) for path in fields}
    whole = name.startswith(("ModelInfer", "ModelStream", "Server", "Repository", "ModelMetadata", "Infer"))
    if whole and name not in ("InferResponseStatistics", "InferStatistics"):
        assert fields == expected  # of configurations and statistics only some are offered


def test_the_datatypes_have_tritons_numbers() -> None:
    enum = messages().ModelInput.DESCRIPTOR.fields_by_name["data_type"].enum_type
    assert {value.name: value.number for value in enum.values} == dict(triton_config.DataType.items())


def test_every_method_of_the_service_is_answered() -> None:
    [service] = triton_messages.DESCRIPTOR.services_by_name.values()
    servicer = Servicer(Engine(ModelRepository(), WallClock()), Readiness(), str)
    ours = {*servicer.methods, "ModelStreamInfer", *REFUSED}
    assert service.full_name == SERVICE
    assert ours == set(service.methods_by_name)
    [declared] = FileDescriptorSet.FromString(COMPILED.read_bytes()).file[0].service
    assert ours - set(REFUSED) == {method.name for method in declared.method}
