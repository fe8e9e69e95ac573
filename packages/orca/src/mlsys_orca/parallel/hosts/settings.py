"""Settings of a server whose model lies on several hosts. Plain data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from mlsys_core.errors import InvalidInputError
from mlsys_serving.http.tls import TlsConfig

HEARTBEAT_TIMEOUT_S = 5.0
JOIN_TIMEOUT_S = 300.0
_NOWHERE = ("", "0.0.0.0", "::", "*")


class NodePlacer(Protocol):
    """Starter of a server's nodes on other machines; the factory of a placement policy makes one.

    The factory takes the model's name and the keywords ``address``, ``tensor_parallel``, ``pipeline_parallel``,
    ``num_replicas``, ``num_threads`` and ``silence_s``; it refuses what does not fit by ``InvalidInputError``.
    """

    @property
    def num_nodes(self) -> int:
        """Nodes that hold parts."""
        ...

    @property
    def host(self) -> str:
        """This machine's address, as the nodes reach it."""
        ...

    def keep_nodes(self, *, join: tuple[str, int], secret: bytes, lost: int) -> int:
        """Keep a node in each seat until SIGTERM, in a forked process of its own; return the exit code.

        Args:
            join: Host and port at which nodes join.
            secret: Of this run.
            lost: Descriptor from which the numbers of seats are read whose nodes the server has lost, a byte each; at
                its end the server is gone.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class HostsSettings:
    """Nodes of one server.

    Raises:
        InvalidInputError: a number is out of range, or nobody could reach the address.
    """

    num_nodes: int  # that hold parts, this machine among them if it does
    host: str  # address of this machine that the others reach
    port: int  # at which nodes join; 0: any free one
    secret: bytes
    model: Path  # this machine's copy
    dtype: str
    weights: str | None
    activations: str | None = None
    tls: TlsConfig | None = None  # of control; None: it is plain, with codes
    holds_parts: bool = True  # this machine is one of the nodes
    num_threads: int = 0  # of each rank on this machine; 0: its cores, divided
    heartbeat_timeout_s: float = HEARTBEAT_TIMEOUT_S  # after which a silent node is lost
    join_timeout_s: float = JOIN_TIMEOUT_S  # for all nodes to join at the start
    placer: NodePlacer | None = None  # starts the nodes; None: someone runs 'mlsys orca worker' on each machine

    def __post_init__(self) -> None:
        if self.num_nodes < 1:
            raise InvalidInputError(f"--nodes {self.num_nodes} holds no model: give 1 or more")
        if self.host in _NOWHERE:
            raise InvalidInputError(
                f"--listen {self.host}:{self.port} names no address that other machines can reach: give this machine's"
            )


def parse_address(text: str, option: str) -> tuple[str, int]:
    """Return host and port of ``HOST:PORT``.

    Args:
        text: As given.
        option: That gave it, for the error.

    Raises:
        InvalidInputError: it is not written so.

    Example:
        >>> parse_address("10.0.0.1:7000", "--join")
        ('10.0.0.1', 7000)
    """
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise InvalidInputError(f"{option} {text!r} is not written HOST:PORT, such as 10.0.0.1:7000")
    return host.strip("[]"), int(port)
