"""Run the Python blocks of a page one after another, as a reader would who pastes them: ``python run_page.py PAGE``."""

from __future__ import annotations

import re
import socket
import sys
from pathlib import Path

from tests.docs.blocks import blocks_of

_PORT = re.compile(r"(?<=:)80\d\d(?=\b)|(?<=port=)80\d\d\b|(?<=--port )80\d\d\b|(?<=-port )80\d\d\b")


def on_free_ports(page: str) -> str:
    """Return the page with a free port of this machine for each that it names."""
    free: dict[str, str] = {}
    for port in _PORT.findall(page):
        if port not in free:
            with socket.create_server(("127.0.0.1", 0)) as bound:
                free[port] = str(bound.getsockname()[1])
    return _PORT.sub(lambda match: free[match[0]], page)


def run(page: Path) -> None:
    """Run the blocks in one namespace; a traceback names the page's lines."""
    names = {"__name__": "__main__"}
    for block in blocks_of(on_free_ports(page.read_text(encoding="utf-8"))):
        if block.language != "python":
            continue
        try:
            exec(compile("\n" * (block.line - 1) + block.text, str(page), "exec"), names)
        except SystemExit as end:
            if end.code:
                raise


if __name__ == "__main__":
    run(Path(sys.argv[1]))
