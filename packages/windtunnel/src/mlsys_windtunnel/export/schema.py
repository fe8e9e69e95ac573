"""Validation of ``graph.json`` and of programs' descriptions by ``graph.schema.json``, before anything is made."""

from __future__ import annotations

import json
import re
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import jsonschema_rs
from mlsys_core.errors import InvalidInputError

_SURROGATE = re.compile(r"\\ud[89a-f][0-9a-f]{2}")
FIRST = 3  # version from which on the schema holds


def check_schema(found: dict[str, Any], what: Literal["graph", "program"], path: Path) -> None:
    """Look at a file's JSON; files older than the schema are not looked at here.

    Raises:
        InvalidInputError: It is none by the schema; the message names the place.
    """
    version = found.get("version")
    if isinstance(version, int) and version < FIRST:
        return
    try:
        error = next(_validator(what).iter_errors(found), None)
    except UnicodeEncodeError:  # half a surrogate pair, which categories may have and the validator cannot read
        error = next(_validator(what).iter_errors(json.loads(_SURROGATE.sub("?", json.dumps(found)))), None)
    if error is not None:
        place = "/".join(map(str, error.instance_path)) or "the whole"
        is_not = "it does not describe a module" if what == "graph" else "its description is damaged"
        raise InvalidInputError(f"{path} is damaged: {is_not} ({place:.200}: {error.message:.200})")


@lru_cache(maxsize=2)
def _validator(what: str) -> Any:
    text = resources.files("mlsys_windtunnel.export").joinpath("graph.schema.json").read_text(encoding="utf-8")
    schema = json.loads(text)
    return jsonschema_rs.Draft202012Validator({**schema, "$ref": f"#/$defs/{what}"})
