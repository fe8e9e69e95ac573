"""The messages of the protocol's gRPC service, as ``open_inference.proto`` declares them.

They live in a descriptor pool of their own, so that a client's generated messages may be in the same process.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

SERVICE = "inference.GRPCInferenceService"
COMPILED = Path(__file__).with_name("open_inference.binpb")  # the .proto, compiled by ``make proto``


@cache
def messages() -> Any:
    r"""Return a namespace with the class of each top-level message: ``messages().ModelInferRequest``.

    Example:
        >>> messages().ServerLiveResponse(live=True).SerializeToString()
        b'\x08\x01'
    """
    (file,) = FileDescriptorSet.FromString(COMPILED.read_bytes()).file
    pool = DescriptorPool()
    pool.Add(file)
    names = [message.name for message in file.message_type]
    return SimpleNamespace(
        **{name: GetMessageClass(pool.FindMessageTypeByName(f"{file.package}.{name}")) for name in names}
    )
