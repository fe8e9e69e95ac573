"""A function in a process of its own, with this interpreter or that of an environment which holds peers.

The child is ``python -m mlsys_bench.harness.child MODULE:FUNCTION JSON``: what it prints are messages, the last line is
the function's result as JSON. Nothing but this repository's sources need be shared with the environment.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

_RESULT = "result: "


def interpreter(peers: str | Path | None, default: Path) -> Path:
    """Return the Python of an environment with peers.

    Args:
        peers: The environment's folder or its Python; None: ``default`` where it is there, else this interpreter.
        default: The folder where the requirements file of the peers says to install them.

    Raises:
        InvalidInputError: there is no Python in ``peers``.
    """
    from mlsys_core.errors import InvalidInputError

    folder = Path(peers) if peers is not None else default
    candidates = [folder] if folder.is_file() else [folder / "bin" / "python", folder / "Scripts" / "python.exe"]
    for candidate in candidates:
        if candidate.exists():
            return candidate.absolute()  # not resolved: a link's target is another environment
    if peers is not None:
        raise InvalidInputError(
            f"{peers} is no environment with a Python; benchmarks/peers/{default.name}/requirements.txt says how to "
            "make one"
        )
    return Path(sys.executable)


def run_in_child(
    function: str,
    arguments: Mapping[str, object],
    *,
    python: Path | None = None,
    env: Mapping[str, str] | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Any:
    """Call a function in a process of its own and return its result, which passes as JSON.

    Args:
        function: ``module:function``.
        arguments: By keyword; JSON values.
        python: The interpreter; None: this one.
        env: Variables beside our own.
        say: Told each line that the child prints.

    Raises:
        MlsysError: it ended without a result; the message has its last words.
    """
    from mlsys_core.errors import MlsysError

    command = [str(python or sys.executable), "-m", __name__, function, json.dumps(dict(arguments))]
    variables = environment() | dict(env or {})
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=variables) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        result = None
        try:
            for line in child.stdout:
                if line.startswith(_RESULT):
                    result = json.loads(line.removeprefix(_RESULT))
                else:
                    say(line.strip())
            errors = child.stderr.read()
        except BaseException:
            child.kill()
            raise
    if child.returncode != 0 or result is None:
        last = " ".join(errors.strip().splitlines()[-1:]) or f"exit status {child.returncode}"
        raise MlsysError(f"{function} ended without a result: {last}")
    return result


def environment() -> dict[str, str]:
    """Return our variables with the sources of all loaded ``mlsys_*`` packages on the path.

    OpenMP's threads wait as they do by default: the command line asks them to sleep at once, which a server on a shared
    host wants. That is slower for small operators, and between turns there is time to stop.
    """
    found = {key: value for key, value in os.environ.items() if key != "OMP_WAIT_POLICY"}
    loaded = [module for name, module in sys.modules.items() if name.startswith("mlsys_") and "." not in name]
    roots = [str(Path(str(module.__file__)).parents[1]) for module in loaded]
    found["PYTHONPATH"] = os.pathsep.join([*dict.fromkeys(roots), *filter(None, [os.environ.get("PYTHONPATH")])])
    return found


def free_port() -> int:
    """Return a port of 127.0.0.1 on which nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> int:
    """Call what the command line names and print its result."""
    module, _, function = sys.argv[1].partition(":")
    warnings.simplefilter("ignore")
    result = getattr(importlib.import_module(module), function)(**json.loads(sys.argv[2]))
    print(f"{_RESULT}{json.dumps(result)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
