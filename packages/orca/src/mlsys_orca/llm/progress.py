"""A bar on stderr for many prompts."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def counting(total: int, shown: bool | None) -> Iterator[Callable[[], None]]:
    """Give a function to call after each answer.

    Args:
        total: Answers in all.
        shown: Show a bar; None: in a terminal, for several.
    """
    if not (total > 1 and sys.stderr.isatty() if shown is None else shown):
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()]
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("answering", total=total)
        yield lambda: bar.advance(task)
