"""Actor of one seat: starts the node's process on its machine, and answers the launcher's beats. Imports no torch."""

from __future__ import annotations

import os
import subprocess
import sys

import msgspec

from mlsys_ray.node import NodeOrder

_REASON_NBYTES = 4096


class NodeActor:
    """A node process on the machine where Ray has placed this actor.

    The process has one thread and forks, which an actor cannot. It ends with the actor, however that ends: its standard
    input is a pipe from here.

    Args:
        order: Model, server and secret; kept in memory.
    """

    def __init__(self, order: NodeOrder) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "mlsys_ray.node"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(order) + b"\n")
        self._process.stdin.flush()

    def beat(self) -> tuple[int, str] | None:
        """Return None while the node lives, else its exit code and the reason it gave."""
        code = self._process.poll()
        if code is None:
            return None
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        reason = (self._process.stdout.read(_REASON_NBYTES) or b"").decode(errors="replace").strip()
        return code, reason or f"exit status {code}"
