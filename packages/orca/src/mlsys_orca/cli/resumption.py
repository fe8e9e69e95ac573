"""Note beside an output file by which ``mlsys orca generate --resume`` goes on: which input, with which settings."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlsys_core.errors import InvalidInputError
from mlsys_core.posix import lock_file, read_at, write_at


@dataclass(frozen=True, slots=True)
class Standing:
    """Progress of an output file."""

    num_done: int  # answers that it has
    seed: int  # from which those of lines that bring none follow

    def seed_of(self, index: int) -> int:
        """Return the seed of a line that brings none, the same in every run; 63 bits.

        Example:
            >>> Standing(0, 7).seed_of(3) == Standing(2, 7).seed_of(3)
            True
        """
        digest = hashlib.blake2b(f"{self.seed}/{index}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1


@contextmanager
def going_on(output: Path | None, source: str, settings: Mapping[str, Any], *, resumes: bool) -> Iterator[Standing]:
    """Yield how far ``output`` is; while the context is open no other run writes it.

    What a run that was killed left unfinished at the file's end is cut.

    Args:
        output: Where answers go; None: nowhere that stays.
        source: Path of the input; - is standard input.
        settings: What answers depend on beside the input; JSON.
        resumes: Go on behind the answers that are there.

    Raises:
        InvalidInputError: there are answers and ``resumes`` is False, they are of another input or other settings, or
            another run writes them.
    """
    if output is None or source == "-" or (output.exists() and not output.is_file()):
        if resumes:
            what = "a file to read, not standard input" if source == "-" else "a file as --output, to go on with"
            raise InvalidInputError(f"--resume needs {what}")
        if output is not None:
            _refuse_answers(output)
        yield Standing(0, secrets.randbits(63))
        return
    note = output.with_name(f"{output.name}.resume")
    if not resumes:
        _refuse_answers(output)
    elif _has_answers(output) and not note.is_file():
        raise InvalidInputError(
            f"{output} has answers, and {note.name}, which says of what, is missing: give another --output"
        )
    with Path(source).open("rb") as file:
        now = {"input_sha256": hashlib.file_digest(file, "sha256").hexdigest(), **settings}
    try:
        fd = os.open(note, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise InvalidInputError(f"{note} cannot be written: {error.strerror}") from error
    try:
        seed = _agreed(fd, note, now, is_new=not _has_answers(output))
        yield Standing(num_done(output), seed)
    finally:
        os.close(fd)


def _has_answers(output: Path) -> bool:
    return output.exists() and output.stat().st_size > 0


def _refuse_answers(output: Path) -> None:
    if _has_answers(output):
        raise InvalidInputError(
            f"{output} exists: go on behind its answers with --resume, give another --output, or remove it"
        )


def _agreed(fd: int, note: Path, now: Mapping[str, Any], *, is_new: bool) -> int:
    """Return the seed that the note has, after comparing it with what is ``now``; write it where there is none yet.

    Raises:
        InvalidInputError: it differs, or another run has it open.
    """
    if not lock_file(fd, waits=False):
        raise InvalidInputError(f"another run writes {note.with_suffix('')}: wait for its end")
    try:
        before = json.loads(read_at(fd, 1 << 20, 0))
        seed = int(before.pop("seed"))
    except (ValueError, KeyError, TypeError, AttributeError):
        before, seed = None, secrets.randbits(63)
    if is_new:  # whatever an earlier run noted, nothing came of it
        text = json.dumps({**now, "seed": seed}, indent=1).encode() + b"\n"
        os.ftruncate(fd, 0)
        write_at(fd, text, 0)
        os.fsync(fd)
        return seed
    if before is None:
        raise InvalidInputError(f"{note} cannot be read: give another --output, or remove {note.with_suffix('')}")
    if different := [name for name in now if before.get(name) != now[name]]:
        told = (
            "of another input" if name == "input_sha256" else f"with {name} {before.get(name)!r}" for name in different
        )
        raise InvalidInputError(
            f"the answers in {note.with_suffix('')} were made {', '.join(told)}: give what was given then, or another "
            "--output"
        )
    return seed


def num_done(output: Path) -> int:
    r"""Count the answers that ``output`` holds from an earlier run; what follows the last whole one is cut.

    Example:
        >>> from tempfile import mkdtemp
        >>> path = Path(mkdtemp()) / "answers.jsonl"
        >>> _ = path.write_bytes(b'{"index": 0}\n{"ind')
        >>> num_done(path), path.read_bytes()
        (1, b'{"index": 0}\n')
    """
    if not output.exists():
        return 0
    num, nbytes = 0, 0
    with output.open("rb") as file:
        for line in file:
            try:
                is_next = line.endswith(b"\n") and json.loads(line)["index"] == num
            except (ValueError, KeyError, TypeError):
                is_next = False
            if not is_next:
                break
            num, nbytes = num + 1, nbytes + len(line)
    if nbytes < output.stat().st_size:
        os.truncate(output, nbytes)
    return num
