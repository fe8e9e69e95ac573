"""A parser that fails in each of the ways that the runner must notice."""

from __future__ import annotations

import os
import zlib
from pathlib import Path

from mlsys_core.errors import InvalidInputError

from tests.fuzz.target import Case, Input, Target

SEED = b'{"a": [1, 2, "b"]}'


def fate(made: Input) -> str:
    """Return what becomes of an input."""
    assert isinstance(made, bytes)
    if made == SEED:
        return "taken"
    number = zlib.crc32(made) % 16
    return {0: "raised", 1: "killed", 2: "stuck", 3: "refused", 4: "refused"}.get(number, "taken")


def prepare(folder: Path) -> Case:
    """Return the one seed and the parser."""

    def parse(made: Input) -> None:
        what = fate(made)
        if what == "raised":
            raise KeyError("found")
        if what == "killed":
            os._exit(3)
        while what == "stuck":
            pass
        if what == "refused":
            raise InvalidInputError("no")

    return Case([SEED], parse)


TARGETS = (Target("selftest", prepare),)
