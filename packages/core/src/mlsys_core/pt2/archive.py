"""The zip archive of a ``.pt2`` file: uncompressed members, read with their sizes checked first."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from types import TracebackType
from typing import Any

from mlsys_core.errors import InvalidInputError

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
