"""Settings of what a server writes down, so that it goes on after its own death."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlsys_serving.journal import SyncPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalConfig:
    """Settings of ``--journal``."""

    folder: Path
    sync: SyncPolicy = "interval"
    max_nbytes: int = 1 << 30  # of all files and batches; the journal of streams has as much
    keep_s: float | None = None  # that ended work is kept; None: a day for batches, ten minutes for streams
    is_passing: bool = False  # the folder ends with the server: streams are not written there
    reach: Callable[[str], None] = lambda _: None  # called with the names of steps, for tests


@contextmanager
def kept_or_passing(config: JournalConfig | None) -> Iterator[JournalConfig]:
    """Yield ``config``, or that of a new folder which is deleted when the context ends."""
    if config is not None:
        yield config
        return
    folder = Path(tempfile.mkdtemp(prefix="mlsys-orca-"))
    try:
        yield JournalConfig(folder=folder, sync="never", is_passing=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
