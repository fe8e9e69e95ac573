"""Journals: append-only logs of checksummed records, by which a server goes on after its own death."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlsys_core.lazy import lazy_exports

__all__ = [
    "SYNC_POLICIES",
    "Journal",
    "JournalInUseError",
    "JournalUnavailableError",
    "LogFile",
    "SyncPolicy",
    "make_folder",
]

if TYPE_CHECKING:
    from mlsys_serving.journal.journal import SYNC_POLICIES, Journal, SyncPolicy, make_folder
    from mlsys_serving.journal.log_file import JournalInUseError, JournalUnavailableError, LogFile

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "journal": ["SYNC_POLICIES", "Journal", "SyncPolicy", "make_folder"],
        "log_file": ["JournalInUseError", "JournalUnavailableError", "LogFile"],
    },
)
