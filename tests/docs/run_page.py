"""Run the blocks of a page one after another, as a reader would who pastes them: ``main()`` with PAGE, a FOLDER, and a
folder that has the command ``mlsys``.

On the pages of :data:`ALL_RUN` shell blocks run too; one that only serves goes on beside those that follow. A block
with a title is that file.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

from tests.docs.blocks import SHELLS, blocks_of
from tests.docs.serving import serving

_PORT = re.compile(r"(?<=:)80\d\d(?=\b)|(?<=port=)80\d\d\b|(?<=--port )80\d\d\b|(?<=-port )80\d\d\b")
_SERVES = re.compile(r"mlsys (?:\w+ serve|serve \w+) [^\n]*\n?")
ALL_RUN = ("start", "tutorials", "how-to")  # folders of the documentation


def on_free_ports(page: str) -> str:
    """Return the page with a free port of this machine for each that it names."""
    free: dict[str, str] = {}
    for port in _PORT.findall(page):
        if port not in free:
            with socket.create_server(("127.0.0.1", 0)) as bound:
                free[port] = str(bound.getsockname()[1])
    return _PORT.sub(lambda match: free[match[0]], page)


def run(page: Path) -> None:
    """Run the blocks, Python's in one namespace; a traceback names the page's lines."""
    names = {"__name__": "__main__"}
    for block in blocks_of(on_free_ports(page.read_text(encoding="utf-8"))):
        if block.title is not None:
            path = Path(block.title)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text, encoding="utf-8")
        elif block.language == "python":
            try:
                exec(compile("\n" * (block.line - 1) + block.text, str(page), "exec"), names)
            except SystemExit as end:
                if end.code:
                    raise
        elif block.language in SHELLS and page.parent.name in ALL_RUN:
            run_shell(block.text)


def run_shell(text: str) -> None:
    """Run shell commands in this folder; what only serves is started, and ends with this process."""
    if _SERVES.fullmatch(text):
        serving(text)
        return
    subprocess.run(["bash", "-euo", "pipefail", "-c", text], check=True)


def main() -> int:
    """Run a page in a folder and in a session of its own."""
    page, folder, commands = sys.argv[1:]
    os.setsid()
    os.chdir(folder)
    sys.path.insert(0, folder)
    os.environ["MPLBACKEND"] = "agg"
    os.environ["PATH"] = os.pathsep.join((commands, str(Path(sys.executable).parent), os.environ["PATH"]))
    run(Path(page))
    return 0
