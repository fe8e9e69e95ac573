"""Renewal of locks and threads in forked processes, which have one thread and may inherit held locks."""

from __future__ import annotations

import threading
import weakref
from typing import Protocol

import torch
from mlsys_core.posix import at_fork

CAPTURE_LOCK = threading.RLock()  # a capture sets flags of the whole process, so no fork may happen within one


class Renewable(Protocol):
    """Object with locks or threads of its own."""

    def renew(self) -> None:
        """Make new free locks, and forget threads."""
        ...


_OBJECTS: weakref.WeakSet[Renewable] = weakref.WeakSet()


def renew_in_forks(owner: Renewable) -> None:
    """Call an object's ``renew`` in every process that is forked from now on, while the object lives.

    Example:
        >>> class Counter:
        ...     def renew(self) -> None:
        ...         self.lock = threading.Lock()
        >>> renew_in_forks(Counter())
    """
    _OBJECTS.add(owner)


def _renew_all() -> None:
    CAPTURE_LOCK.release()
    if _OBJECTS:
        torch.set_num_threads(1)  # OpenMP would wait for threads that do not exist here
    for owner in list(_OBJECTS):
        owner.renew()


at_fork(before=CAPTURE_LOCK.acquire, in_parent=CAPTURE_LOCK.release, in_child=_renew_all)
