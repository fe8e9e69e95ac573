"""The score: requests as rows, batches as columns, live at ``/`` of every server and offline from a recording.

Engines write to a :class:`~.board.Board` while somebody looks on (``docs/score.md``); otherwise they keep their latest
events in a ring. Names are imported when they are asked for, since engines need no web framework.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlsys_core.lazy import lazy_exports

if TYPE_CHECKING:
    from mlsys_serving.score.batches import BatchSource
    from mlsys_serving.score.board import Board, Source
    from mlsys_serving.score.events import Kind, Square
    from mlsys_serving.score.front import Score, ScoreFront
    from mlsys_serving.score.log import EventLog
    from mlsys_serving.score.page import recording_page
    from mlsys_serving.score.recording import ScoreRecording, parse_recording, read_recording

__all__ = [
    "BatchSource",
    "Board",
    "EventLog",
    "Kind",
    "Score",
    "ScoreFront",
    "ScoreRecording",
    "Source",
    "Square",
    "parse_recording",
    "read_recording",
    "recording_page",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "batches": ["BatchSource"],
        "board": ["Board", "Source"],
        "events": ["Kind", "Square"],
        "front": ["Score", "ScoreFront"],
        "log": ["EventLog"],
        "page": ["recording_page"],
        "recording": ["ScoreRecording", "parse_recording", "read_recording"],
    },
)
