"""The files of the project that a call enters, and those that a page of ``docs/ways`` lists."""

from __future__ import annotations

import gc
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).resolve().parent.parent
_ENTRY = re.compile(r"^\s*(?:\d+\.|[-*]|\|)\s*`(mlsys_\w+(?:/\w+)*\.py)`")


def files_passed(call: Callable[[], object], *, start: Callable[[], object] = lambda: None) -> list[str]:
    """Return the project's files whose functions run during a call, such as ``mlsys_core/loop/queue.py``, as entered.

    Threads that start during the call are watched too; those that run already are not, so start a server within the
    call, or by ``start``. Modules that are only imported do not count. Make the call once before: what is planned at
    first use is no part of a request's way.

    Args:
        call: The call.
        start: Called first: its threads are watched, its own files do not count.
    """
    entered: dict[str, None] = {}

    def watch(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_name != "<module>":
            name = _short(frame.f_code.co_filename)
            if name is not None:
                entered.setdefault(name)

    gc.disable()  # what earlier tests left is not finalised within the call
    before = sys.getprofile()
    threading.setprofile(watch)
    sys.setprofile(watch)
    try:
        start()
        entered.clear()
        call()
    finally:
        sys.setprofile(before)
        threading.setprofile(None)
        gc.enable()
    return list(entered)


def files_of_page(page: str) -> list[str]:
    """Return the files that the items of a page's lists and tables begin with, in order.

    Args:
        page: Path from the repository's root, such as ``docs/ways/row.md``.
    """
    lines = (ROOT / page).read_text(encoding="utf-8").splitlines()
    return [found[1] for line in lines if (found := _ENTRY.match(line))]


def num_lines(files: list[str]) -> int:
    """Return the lines of some of the project's files, named as :func:`files_passed` names them."""
    sources = [*ROOT.glob("packages/*/src"), *ROOT.glob("plugins/*/src")]
    paths = [source / name for name in files for source in sources]
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths if path.exists())


def _short(path: str) -> str | None:
    """Return a file's path below its distribution's sources; None for files that are not the project's."""
    at = path.rfind("/src/mlsys_")
    return path[at + len("/src/") :] if at >= 0 else None
