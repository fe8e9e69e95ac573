"""The zip archive of a ``.pt2`` file: uncompressed members with checked sizes, and tensors from their raw bytes."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from mlsys_core.errors import InvalidInputError

if TYPE_CHECKING:
    from torch import Tensor


MAX_MEMBERS = 1 << 17
MAX_JSON_NBYTES = 1 << 27  # the graph of a large language model takes some 20 MiB
_FORMAT_FILE = "archive_format"


class Archive:
    """Members of one ``.pt2`` file by name below its root folder.

    torch stores members uncompressed; compressed ones are refused, so no file needs more memory than its own size.

    Args:
        path: The file.

    Raises:
        InvalidInputError: no such file, no zip archive, another format, or members that overlap, repeat or are
            compressed.
    """

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise InvalidInputError(f"there is no file {path}; write one with torch.export.save(program, path)")
        try:
            self._zip = zipfile.ZipFile(path)
        except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
            raise InvalidInputError(
                f"{path} is not what torch.export.save writes: it is no zip archive ({error})"
            ) from error
        self.path = path
        try:
            self._members = self._checked(path.stat().st_size)
        except BaseException:
            self._zip.close()
            raise

    def __enter__(self) -> Archive:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._zip.close()

    @property
    def names(self) -> frozenset[str]:
        """Names of all members, without the root folder."""
        return frozenset(self._members)

    def nbytes(self, name: str) -> int:
        """Return a member's size.

        Raises:
            InvalidInputError: there is no such member.
        """
        return self._member(name).file_size

    def read(self, name: str) -> bytes:
        """Return a member's bytes after comparing its checksum.

        Raises:
            InvalidInputError: there is no such member, or it is damaged.
        """
        member = self._member(name)
        try:
            return self._zip.read(member)
        except (zipfile.BadZipFile, OSError, ValueError, EOFError, RuntimeError, NotImplementedError) as error:
            raise self.damaged(f"{name}: {error}") from error

    def read_text(self, name: str) -> str:
        """Return a member's text, at most :data:`MAX_JSON_NBYTES` of it.

        Raises:
            InvalidInputError: there is no such member, it is damaged, too large, or no UTF-8.
        """
        if self.nbytes(name) > MAX_JSON_NBYTES:
            raise self.damaged(f"{name} has {self.nbytes(name):,} bytes of text; {MAX_JSON_NBYTES:,} are allowed")
        try:
            return self.read(name).decode()
        except UnicodeDecodeError as error:
            raise self.damaged(f"{name} is no UTF-8") from error

    def read_json(self, name: str) -> Any:
        """Return a member's JSON.

        Raises:
            InvalidInputError: as :meth:`read_text`, or it is no JSON.
        """
        text = self.read_text(name)
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            raise self.damaged(f"{name} is no JSON ({error})") from error

    def damaged(self, reason: str) -> InvalidInputError:
        """Return an error that says why this file is refused."""
        return InvalidInputError(f"{self.path} cannot be read safely: {reason}")

    def _member(self, name: str) -> zipfile.ZipInfo:
        try:
            return self._members[name]
        except KeyError:
            raise self.damaged(f"it lacks {name}; write it with torch.export.save of torch 2.11 or later") from None

    def _checked(self, nbytes: int) -> dict[str, zipfile.ZipInfo]:
        infos = self._zip.infolist()
        root = next((info.filename[: -len(_FORMAT_FILE)] for info in infos if _is_format(info.filename)), None)
        if root is None:
            raise self.damaged("it lacks archive_format; write it with torch.export.save of torch 2.11 or later")
        members: dict[str, zipfile.ZipInfo] = {}
        for info in infos:
            name = info.filename.removeprefix(root)
            if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size or info.flag_bits & 1:
                raise self.damaged(f"{info.filename!r} is compressed or encrypted, which torch never does")
            if name in members or not info.filename.startswith(root):
                raise self.damaged(f"{info.filename!r} is there twice, or outside {root!r}")
            members[name] = info
        if len(members) > MAX_MEMBERS or sum(info.file_size for info in infos) > nbytes:
            raise self.damaged("its members overlap, or claim to be larger than the file")
        return members


def _is_format(name: str) -> bool:
    return name.count("/") == 1 and name.endswith(f"/{_FORMAT_FILE}")


_STRIDED = 7  # schema.Layout.Strided
_MAX_DIMENSIONS = 64


def read_tensors(archive: Archive, folder: str, payloads: dict[str, Any]) -> dict[str, Tensor]:
    """Return tensors by name; those of one member share its memory, as they did when they were saved.

    Args:
        archive: The file.
        folder: ``data/weights`` or ``data/constants``.
        payloads: ``torch._export.serde.schema.PayloadMeta`` by name.

    Raises:
        InvalidInputError: one is kept as a pickle, or reaches past its bytes.
    """
    from torch import nn

    storages: dict[tuple[str, int], Tensor] = {}
    tensors: dict[str, Tensor] = {}
    for name, payload in payloads.items():
        meta = payload.tensor_meta
        if payload.use_pickle or meta is None:
            raise archive.damaged(f"{name} is kept as a pickle, which can run any code when it is loaded")
        key = (payload.path_name, int(meta.dtype))
        if key not in storages:
            storages[key] = _storage(archive, f"{folder}/{payload.path_name}", meta)
        try:
            tensor = _view(storages[key], meta)
        except (InvalidInputError, RuntimeError, TypeError) as error:
            raise archive.damaged(f"{name}: {str(error).splitlines()[0]}") from error
        tensors[name] = nn.Parameter(tensor, requires_grad=meta.requires_grad) if payload.is_param else tensor
    return tensors


def _storage(archive: Archive, name: str, meta: Any) -> Tensor:
    """Return a member's bytes as a tensor of one dimension, on its device."""
    import torch
    from torch._export.serde.serialize import deserialize_device, deserialize_scalar_type

    dtype = deserialize_scalar_type(meta.dtype)
    size = torch.empty((), dtype=dtype).element_size()
    content = bytearray(archive.read(name))
    if len(content) % size:
        raise archive.damaged(f"{name} has {len(content)} bytes, no multiple of {size} ({dtype})")
    flat = torch.frombuffer(content, dtype=dtype) if content else torch.empty(0, dtype=dtype)
    device = deserialize_device(meta.device)
    return flat if device.type == "cpu" else flat.to(device)


def _view(storage: Tensor, meta: Any) -> Tensor:
    """Return the part of ``storage`` that ``meta`` describes, within its bounds."""
    if meta.layout != _STRIDED:
        raise InvalidInputError(f"it is of layout {meta.layout}, not strided")
    sizes, strides = _numbers(meta.sizes), _numbers(meta.strides)
    (offset,) = _numbers([meta.storage_offset])
    if len(sizes) != len(strides) or len(sizes) > _MAX_DIMENSIONS:
        raise InvalidInputError(f"{len(sizes)} sizes and {len(strides)} strides")
    last = offset + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    if 0 not in sizes and last >= storage.numel():
        raise InvalidInputError(f"shape {sizes} from {offset} on reaches past its {storage.numel()} elements")
    if 0 in sizes:
        return storage.new_empty(sizes)
    return storage.as_strided(sizes, strides, offset)


def _numbers(values: list[Any]) -> list[int]:
    if any(value.type != "as_int" or value.as_int < 0 for value in values):
        raise InvalidInputError("its sizes are no numbers")
    return [value.as_int for value in values]
