"""A case: a name, and what to ask a server; its outcome is plain JSON, equal on servers with equal habits."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Server:
    """Addresses of a server, and what it said in errors: for people, as each server has words of its own."""

    http: str  # host:port
    grpc: str
    said: list[str] = field(default_factory=list)

    def note(self, message: str) -> bool:
        """Keep an error's message; return whether there is one."""
        self.said.append(message)
        return bool(message.strip())


@dataclass(frozen=True)
class Case:
    """One question."""

    name: str
    ask: Callable[[Server], Any]
    has_steps: bool = False

    def outcomes(self, server: Server) -> dict[str, Any]:
        """Return what came of it, as JSON, by name; a case of several steps has one for each."""
        server.said.clear()
        found = json.loads(json.dumps(self.ask(server)))
        if isinstance(found, dict) and self.has_steps:
            return {f"{self.name}: {step}": outcome for step, outcome in found.items()}
        return {self.name: found}
