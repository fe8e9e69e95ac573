"""The page: one HTML document that loads nothing, of the modules in ``assets/``.

There is no build tool: the modules' ``import`` lines are dropped and ``export`` is taken off, so that all stand in one
script in the order of :data:`MODULES`. Their top-level names must be different, which a test checks.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import json
import re
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

MODULES = (
    *("model", "explain", "theme", "draw", "blocks", "server", "markdown", "chat", "load"),
    *("page", "panels", "recordings", "hands", "main"),
)
_IMPORT = re.compile(r"^import [^;]*;\n", re.MULTILINE)
_EXPORT = re.compile(r"^export ", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Page:
    """The document, as it is sent."""

    html: bytes
    gzipped: bytes
    policy: str  # Content-Security-Policy
    etag: str


@cache
def live_page() -> Page:
    """Return the page of a server."""
    text, policy = _document("mlsys score", None)
    body = text.encode()
    etag = f'"{hashlib.sha256(body).hexdigest()[:20]}"'
    return Page(body, gzip.compress(body, 9, mtime=0), policy, etag)


def recording_page(recording: dict[str, Any], *, title: str) -> str:
    """Return a page that shows ``recording`` and asks no server, as text."""
    return _document(title, recording)[0]


def _document(title: str, recording: dict[str, Any] | None) -> tuple[str, str]:
    """Return the document and its Content-Security-Policy."""
    script = "".join(_EXPORT.sub("", _IMPORT.sub("", _read(f"{name}.js"))) for name in MODULES)
    style = _read("style.css")
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    # A "<" in the data would end its element early; in JSON it may be written as an escape.
    data = "null" if recording is None else json.dumps(recording, separators=(",", ":"), allow_nan=False)
    parts = {
        "TITLE": html.escape(title),
        "STYLE": style,
        "SCRIPT": script,
        "RECORDING": data.replace("<", "\\u003c"),
    }
    return re.sub(r"__(TITLE|STYLE|SCRIPT|RECORDING)__", lambda mark: parts[mark[1]], _read("index.html")), policy


def _read(name: str) -> str:
    return resources.files("mlsys_score").joinpath("assets", name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    """Return the source expression that allows an inline element with this text."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
