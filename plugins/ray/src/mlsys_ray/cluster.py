"""Look at a Ray cluster from outside: Ray's client has threads, and who forks has none, so another process looks."""

from __future__ import annotations

import importlib
import logging
import os
import socket
import subprocess
import sys
from typing import Any

import msgspec
from mlsys_core.errors import InvalidInputError, MissingDependencyError

TIMEOUT_S = 60.0
AUTH_MODE = "RAY_AUTH_MODE"
_CONNECT_S = 5.0


class Cluster(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A running cluster."""

    address: str  # HOST:PORT of its head
    host: str  # this machine's address in it
    cores: dict[str, int]  # of each living node, by its id
    auth: str  # RAY_AUTH_MODE, which Ray itself finds out for the address "auto" alone


class Problem(msgspec.Struct, frozen=True, tag=True):
    """Reason why there is none."""

    message: str
    is_missing: bool = False  # Ray is not installed


def look(address: str) -> Cluster:
    """Return the cluster at ``address``.

    Args:
        address: HOST:PORT of its head; ``"auto"``: the one that this machine is a node of.

    Raises:
        InvalidInputError: there is none, or this machine is no node of it.
        MissingDependencyError: Ray is not installed.
    """
    host, _, port = address.rpartition(":")
    if host and port.isdecimal():  # Ray itself tries for minutes
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()
        except (OSError, OverflowError) as error:
            raise InvalidInputError(
                f"there is no Ray cluster at {address!r} ({error}): start one with 'ray start --head'"
            ) from error
    try:
        done = subprocess.run(
            [sys.executable, "-m", __name__, address],
            capture_output=True,
            timeout=TIMEOUT_S,
            check=True,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired as error:
        raise InvalidInputError(f"the Ray cluster at {address} did not answer for {TIMEOUT_S:.0f} s") from error
    except subprocess.CalledProcessError as error:
        last = error.stderr.decode(errors="replace").strip().splitlines()[-1:] or [f"exit status {error.returncode}"]
        raise InvalidInputError(f"the Ray cluster at {address} cannot be reached: {last[0]}") from error
    found = msgspec.json.decode(done.stdout.splitlines()[-1], type=Cluster | Problem)
    if isinstance(found, Cluster):
        return found
    raise (MissingDependencyError if found.is_missing else InvalidInputError)(found.message)


def _look(address: str) -> Cluster | Problem:
    try:
        ray: Any = importlib.import_module("ray")
    except ModuleNotFoundError:
        return Problem("--executor ray needs Ray: pip install mlsys-ray", is_missing=True)
    try:
        context = ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, ValueError, RuntimeError) as error:  # Ray's, by the kind of address
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return Problem(f"there is no Ray cluster at {address!r} ({reason}): start one with 'ray start --head'")
    alive = [node for node in ray.nodes() if node["Alive"]]
    return Cluster(
        address=context.address_info["gcs_address"],
        host=context.address_info["node_ip_address"],
        cores={node["NodeID"]: int(node["Resources"].get("CPU", 0)) for node in alive},
        auth=os.environ.get(AUTH_MODE, "disabled"),
    )


if __name__ == "__main__":
    sys.stdout.buffer.write(b"\n" + msgspec.json.encode(_look(sys.argv[1])) + b"\n")
