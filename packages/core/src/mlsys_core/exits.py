"""The end of a process that has done its work."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from typing import NoReturn


def end_process(code: int) -> NoReturn:
    """End this process with ``code`` when its exit functions have run and its output is written; free nothing first.

    Python would look for garbage twice and take every module apart: one to two seconds after torch was imported, which
    gain nothing. (mypy ends in this way, too.) Where a thread must be waited for, or output cannot be written, Python's
    own end follows, which does the one and reports the other.
    """
    if any(not thread.daemon for thread in threading.enumerate() if thread is not threading.main_thread()):
        sys.exit(code)
    atexit._run_exitfuncs()
    try:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None and not stream.closed:
                stream.flush()
    except OSError:
        sys.exit(code)
    os._exit(code)


def end_at_once(code: int) -> NoReturn:
    """End this process with ``code`` when its exit functions have run, in the middle of whatever it does."""
    try:
        atexit._run_exitfuncs()
    finally:
        os._exit(code)
