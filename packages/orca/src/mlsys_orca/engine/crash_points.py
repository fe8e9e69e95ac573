"""Named steps of a worker at which a test may have it killed: at each, what :mod:`recovery` promises must hold."""

from __future__ import annotations

import os
import signal
from typing import Literal, get_args

Step = Literal[
    "started",  # the front has chosen this worker; it has done nothing
    "received",  # a message was taken, and not yet followed
    "planned",  # an iteration was planned, and not begun
    "computed",  # its keys, values and tokens are there; nobody knows
    "half sent",  # a part of what it gave has been written
    "sent",  # all of it has
]
STEPS: tuple[Step, ...] = get_args(Step)


class CrashPoints:
    """Kills this process with SIGKILL when it reaches a step for the n-th time; without a step it does nothing.

    Args:
        step: One of :data:`STEPS`; None: none.
        number: 1 is the first time.
    """

    def __init__(self, step: Step | None = None, number: int = 1) -> None:
        self.step, self._left = step, number

    def reach(self, step: Step) -> None:
        """Note that the process has come to ``step``."""
        if step == self.step:
            self._left -= 1
            if self._left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
