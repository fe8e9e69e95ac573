"""A node for tests: ``worker.py MODEL HOST:PORT SECRET-FILE [SECONDS]``; as ``mlsys orca worker`` with one thread."""

from __future__ import annotations

import sys
from pathlib import Path

from mlsys_core.errors import MlsysError
from mlsys_orca.parallel.hosts.node import run_node
from mlsys_orca.parallel.hosts.secrets import read_secret
from mlsys_orca.parallel.hosts.settings import parse_address


def main() -> int:
    try:
        return run_node(
            sys.argv[1],
            join=parse_address(sys.argv[2], "join"),
            secret=read_secret(Path(sys.argv[3])),
            threads=1,
            timeout_s=float(sys.argv[4]) if len(sys.argv) > 4 else 120.0,
            say=lambda line: print(line, flush=True),
        )
    except MlsysError as error:
        print(f"error: {error}", flush=True)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
