"""The command ``mlsys`` that forks a warm process, for pages and other users of a shell: no import of torch for each.

``main()`` runs in the fork; :func:`place` writes the file that stands first on PATH.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from tests.warm import Warm

_FILE = """#!{python} -IS
import json, os, signal, socket, sys

end = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
end.connect({address!r})
asked = os.memfd_create("asked")
about = dict(folder=os.getcwd(), environ=dict(os.environ), words=sys.argv[1:])
os.write(asked, json.dumps(["tests.warm_mlsys", json.dumps(about)]).encode())
socket.send_fds(end, [b"go"], [asked, 0, 1, 2])
_, (fork,), _, _ = socket.recv_fds(end, 16, 1)
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, lambda number, _: signal.pidfd_send_signal(fork, number))
code = int(end.recv(16))
if code < 0:
    signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
sys.exit(code)
"""


def place(warm: Warm, folder: Path) -> Path:
    """Write the command ``mlsys`` into a folder, and return the folder.

    It has the arguments, folder, environment, files and signals of who runs it. Its interpreter and what the warm
    process has imported are the warm process's.

    Args:
        warm: Forks for it; the command fails when that has been closed.
        folder: Stands first on PATH then.
    """
    path = folder / "mlsys"
    path.write_text(_FILE.format(python=sys.executable, address=warm.address), encoding="utf-8")
    path.chmod(0o755)
    return folder


def main() -> int:
    """Run ``mlsys`` as the process would that has asked."""
    from mlsys_core.cli.main import main as mlsys

    about = json.loads(sys.argv[1])
    os.chdir(about["folder"])
    os.environ.clear()
    os.environ.update(about["environ"])
    paths = filter(None, about["environ"].get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:0] = [path for path in paths if path not in sys.path]
    sys.argv = ["mlsys", *about["words"]]
    mlsys()
    return 0
