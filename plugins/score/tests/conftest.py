"""A small Orca server for the score's tests."""

from __future__ import annotations

from tests.orca.conftest import make_gguf
from tests.orca.server.conftest import serve

__all__ = ["make_gguf", "serve"]
