"""The score as a server extension: the page at ``/`` of every server whose batches can be watched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import typer
from mlsys_serving.extensions import Extension, ExtensionOptions, Service


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreOptions(ExtensionOptions):
    """Options of the page."""

    no_ui: Annotated[
        bool, typer.Option("--no-ui", help="Serve no page at /: the live score, and a chat where the model can.")
    ] = False

    def notes(self, url: str) -> Sequence[str]:
        """Return where the page is."""
        return () if self.no_ui else [f"the score, and a chat, at {url}/"]


def extend(service: Service) -> Extension | None:
    """Return the page and its routes; None: it is turned off, or the server has nothing to watch."""
    from mlsys_score.board import Board
    from mlsys_score.front import ScoreFront

    watch = service.watch
    if watch is None or (service.options is not None and service.options.no_ui):
        return None
    board = Board(
        system=service.system,
        unit=watch.unit,
        facts=lambda: {**watch.facts(), "has_panels": bool(service.panels())},
        sources=watch.sources,
    )
    front = ScoreFront(board, panels=service.panels)
    # The page is open, and asks for the key; its events are not. A drain has the viewers leave, or it would wait.
    return Extension(routers=[front.router()], on_drain=[board.close], open_paths=["/"])
