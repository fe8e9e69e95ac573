"""The C++ compiler: its choice, its version, and one bounded run of it."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from mlsys_core.errors import KernelUnavailableError
from mlsys_core.posix import signal_group

COMPILERS = ("c++", "g++", "clang++")
COMPILE_TIMEOUT_S = 900.0  # the largest kernel takes 15 s on a quiet core, and minutes on a crowded one
VERSION_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Compiler:
    """A compiler that has been run once to read its version."""

    command: tuple[str, ...]  # "/usr/bin/c++", perhaps behind a launcher: ("ccache", "g++")
    version: str  # all that it says about itself

    def compile(self, source: Path, out: Path, options: Sequence[str], *, timeout_s: float = COMPILE_TIMEOUT_S) -> None:
        """Compile ``source`` into ``out``.

        Raises:
            KernelUnavailableError: the compiler refuses the file (its first lines are in the message), or hangs.
        """
        command = [*self.command, *options, str(source), "-o", str(out)]
        name = shlex.join(self.command)
        try:
            code, _, errors = run_bounded(command, timeout_s=timeout_s)
        except subprocess.TimeoutExpired:
            _hung[self.command] = f"{name} took more than {timeout_s:g} s to compile {source.name}"
            raise KernelUnavailableError(f"{_hung[self.command]}; set CXX to another compiler") from None
        except OSError as error:
            raise KernelUnavailableError(f"{name} could not be started: {error}") from None
        if code != 0:
            first_lines = " | ".join(errors.splitlines()[:5]) or f"exit status {code}"
            raise KernelUnavailableError(f"{name} could not compile {source.name}: {first_lines}")


def find_compiler(chosen: str | None = None) -> Compiler:
    """Return the compiler of kernels.

    Args:
        chosen: A command line (``CXX``); None: the first of :data:`COMPILERS` on the search path.

    Raises:
        KernelUnavailableError: there is none, or it does not run.
    """
    commands = [tuple(shlex.split(chosen))] if chosen else [(name,) for name in COMPILERS]
    for command in commands:
        if program := shutil.which(command[0]):
            return _asked((program, *command[1:]))
    missing = f"the compiler that CXX names, {chosen!r}, was not found" if chosen else "no C++ compiler was found"
    raise KernelUnavailableError(f"{missing}: apt-get install g++, or install a wheel for this platform")


_hung: dict[tuple[str, ...], str] = {}  # compilers that did not end: no other kernel waits for them


@cache
def _version(command: tuple[str, ...]) -> tuple[int, str]:
    try:
        code, said, errors = run_bounded([*command, "--version"], timeout_s=VERSION_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return 1, f"no answer to --version in {VERSION_TIMEOUT_S:g} s"
    except OSError as error:
        return 1, str(error)
    return code, said if code == 0 else " | ".join(errors.splitlines()[:5]) or f"exit status {code}"


def _asked(command: tuple[str, ...]) -> Compiler:
    code, said = _version(command)
    if command in _hung:
        raise KernelUnavailableError(f"{_hung[command]}; set CXX to another compiler")
    if code != 0:
        raise KernelUnavailableError(f"{shlex.join(command)} does not run: {said}; set CXX to another compiler")
    return Compiler(command, said)


def run_bounded(command: Sequence[str], *, timeout_s: float) -> tuple[int, str, str]:
    """Run ``command`` without input and return its exit status, output and errors.

    Compilers start processes of their own: all of them end with it. Libraries preloaded into this process (an
    allocator, a sanitizer's runtime) are not preloaded into them.

    Raises:
        OSError: it cannot be started.
        subprocess.TimeoutExpired: it took more than ``timeout_s`` seconds, and was killed.
    """
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
        env={name: value for name, value in os.environ.items() if name != "LD_PRELOAD"},
    ) as process:
        try:
            out, errors = process.communicate(timeout=timeout_s)
        except BaseException:
            signal_group(process.pid, signal.SIGKILL)
            raise
        return process.returncode, out, errors
