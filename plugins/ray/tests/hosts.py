"""Machines as far as Ray can tell: each has network, processes and shared memory of its own, and one Ray node.

A host is a process in namespaces of its own, and a wire (:mod:`.wire`) joins them. Nothing has a name, and all ends
with these processes, which end with the test's.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import psutil

T = TypeVar("T")
NET = "198.18.0"  # of addresses for trials (RFC 2544)
_ENDS_WITH_US = ("setpriv", "--pdeathsig", "KILL")
_OWN = ("unshare", "-n", "-m", "-p", "-f", "--kill-child", "--mount-proc", "sh", "-c")
_BEGIN = "mkdir -p /tmp/ray && mount -t tmpfs none /tmp/ray && mount -t tmpfs none /dev/shm && echo && read go && exec "
_RAY = f"{Path(sys.executable).parent}/ray start --block --disable-usage-stats --object-store-memory=80000000"
_ENVIRONMENT = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "5e" * 32, "OMP_NUM_THREADS": "1"}
_SETTINGS = [f"{name}={value}" for name, value in _ENVIRONMENT.items()]
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 1, 0x1000


class Host:
    """One of them.

    Args:
        number: From 0, which has the cluster's head.
        cores: Of its Ray node.
    """

    def __init__(self, number: int, cores: int) -> None:
        self.address = f"{NET}.{number + 1}"
        role = f"--address={NET}.1:6379" if number else "--head --port=6379 --include-dashboard=false"
        self._process = subprocess.Popen(
            [*_ENDS_WITH_US, *_OWN, f"{_BEGIN}{_RAY} {role} --node-ip-address={self.address} --num-cpus={cores}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, **_ENVIRONMENT, "RAY_worker_niceness": "0"},
        )

    def open(self) -> int:
        """Give it its network; return the descriptor of its device."""
        assert self._process.stdout is not None
        said = self._process.stdout.readline()
        assert said == b"\n", said.decode()
        (self.init,) = psutil.Process(self._process.pid).children()
        device = self.call(_new_device)
        for line in ("link set lo up", f"addr add {self.address}/24 dev eth0", "link set eth0 up"):
            subprocess.run(self.within("ip", *line.split()), check=True, capture_output=True)
        return device

    def within(self, *command: str) -> list[str]:
        """Return the words that run a command on it."""
        return [
            "nsenter",
            "-t",
            str(self.init.pid),
            "-n",
            "-m",
            "-p",
            f"--wd={Path.cwd()}",
            "env",
            *_SETTINGS,
            *command,
        ]

    def call(self, function: Callable[[], T]) -> T:
        """Return what a function returns in a thread that has this host's network."""

        def enter() -> None:
            with Path(f"/proc/{self.init.pid}/ns/net").open() as file:
                if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), 0):
                    raise OSError(ctypes.get_errno(), "setns")

        def run() -> T:
            enter()
            return function()

        with ThreadPoolExecutor(1) as pool:
            return pool.submit(run).result()

    def start(self) -> None:
        """Start its Ray node."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(b"go\n")
        self._process.stdin.flush()
        assert any(b"Ray runtime started" in line for line in self._process.stdout), "Ray has not started"

    def die(self) -> None:
        """End all that runs on it at once. Idempotent."""
        self._process.kill()
        self._process.wait()


class Hosts(list[Host]):
    """Hosts, and the wire between them."""

    def __init__(self) -> None:
        super().__init__()
        self._devices: list[int] = []
        self._wire: subprocess.Popen[bytes] | None = None

    def open(self, cores: Sequence[int]) -> None:
        """Make them; their Ray nodes are to have so many cores, and the cluster's head comes first."""
        for number, each in enumerate(cores):
            self.append(Host(number, each))
            self._devices.append(self[-1].open())
        program = [*_ENDS_WITH_US, sys.executable, "-S", str(Path(__file__).with_name("wire.py"))]
        self._wire = subprocess.Popen(
            [*program, *map(str, self._devices)], stdin=subprocess.PIPE, pass_fds=self._devices
        )

    def shape(self, *numbers: int, delay_s: float = 0.0, loss: float = 0.0) -> None:
        """Have all packets to and from some hosts suffer so."""
        assert self._wire is not None
        assert self._wire.stdin is not None
        self._wire.stdin.write("".join(f"{number} {delay_s} {loss}\n" for number in numbers).encode())
        self._wire.stdin.flush()

    def lose(self, number: int) -> None:
        """Have a host die: it tells nobody."""
        self.shape(number, loss=1)
        self[number].die()

    def close(self) -> None:
        """End all."""
        for host in self:
            host.die()
        if self._wire is not None:
            self._wire.kill()
            self._wire.wait()
        for device in self._devices:
            os.close(device)


@contextmanager
def hosts(*cores: int, with_ray: bool = True) -> Iterator[Hosts]:
    """Start hosts, and end them whatever happens."""
    found = Hosts()
    try:
        found.open(cores)
        for host in found if with_ray else ():
            host.start()
        yield found
    finally:
        found.close()


def why_not() -> str | None:
    """Return why there can be no hosts here; None: there can."""
    try:
        with hosts(0, with_ray=False):
            return None
    except (OSError, subprocess.CalledProcessError, AssertionError) as error:
        return f"no network namespaces here: {error}"


def _new_device() -> int:
    """Make the device ``eth0`` in this thread's network; its packets are read and written by who has it open."""
    device = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH14x", b"eth0", _IFF_TUN | _IFF_NO_PI))
    return device
