"""Scenes for the loop: who submits, cancels, drains and stops, in which thread, and what a signal handler does."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from mlsys_core.errors import InvalidInputError, ServingError
from mlsys_core.loop import ServeRequest, WallClock
from mlsys_core.loop.baselines import StaticBatch, ZeroBatch

from tests.oracles.serving_loop.baton import Baton, Choice, load

Plan = Mapping[int, Choice]
DRIVES = ("start", "run_forever", "step", "drain")  # what the main thread does
OTHERS = ("", "submit", "submit_again", "cancel", "drain", "stop")  # what another thread does
HANDLERS = ("", "submit", "cancel", "begin_to_drain", "stop", "raise")  # what a signal handler of the main thread does
LISTENERS = ("raises", "exits")  # how a listener fails after it has taken note
EXECUTORS = ("thread", "inline", "two threads")


@dataclass(frozen=True)
class Scene:
    """One program of a main thread, a signal handler in it, and another thread."""

    drive: str
    other: str
    handler: str
    executor: str
    listener: str = ""

    def __str__(self) -> str:
        parts = f"{self.drive}, {self.other or 'nobody'} beside, {self.handler or 'no'} handler, {self.executor}"
        return f"{parts}, its listener {self.listener}" if self.listener else parts


def scenes() -> Iterator[Scene]:
    """Yield all scenes."""
    for parts in product(DRIVES, OTHERS, HANDLERS, EXECUTORS):
        scene = Scene(*parts)
        if scene.drive != "run_forever" or "stop" in (scene.other, scene.handler):  # somebody ends it
            yield scene
            if scene.other in ("", "stop") and scene.executor == "thread":
                yield from (replace(scene, listener=listener) for listener in LISTENERS)


class Stage:
    """A loop in a scene, and a ledger of what its clients were promised and told."""

    def __init__(self, scene: Scene) -> None:
        self.scene, self.modules = scene, load()
        self.told: Counter[str] = Counter()
        self.accepted: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.early: set[str] = set()  # not told of when drain() said that all had left

    def begin(self, baton: Baton) -> None:
        inline, threads = self.modules.inline.InlineExecutor, self.modules.executors.ThreadExecutor
        run = lambda batch: [request.request_id for request in batch.requests]  # noqa: E731
        make = inline if self.scene.executor == "inline" else threads
        made = [make(run) for _ in range(2 if self.scene.executor == "two threads" else 1)]
        scheduler: Any = StaticBatch(batch_size=2) if self.scene.drive == "drain" else ZeroBatch(max_batch_size=1)
        self.loop = self.modules.serving_loop.ServingLoop(scheduler, made, WallClock(), listener=self)
        handler = getattr(self, f"do_{self.scene.handler}") if self.scene.handler else None
        self.main = baton.add("main", self.run_main, handler, at_waits=self.scene.handler == "raise")
        if self.scene.other:
            baton.add("other", getattr(self, f"do_{self.scene.other}"))

    def run_main(self) -> None:
        try:
            getattr(self, f"main_{self.scene.drive}")()
        except KeyboardInterrupt:  # of the handler that raises
            self.loop.stop()

    def on_output(self, batch: Any, output: Any, now: float) -> None:
        self.fail()

    def on_finished(self, finished: Any, now: float) -> None:
        self.told[finished.request_id] += 1
        self.fail()

    def fail(self) -> None:
        if self.scene.listener:
            raise SystemExit if self.scene.listener == "exits" else KeyError("listener")

    def submit(self, name: str) -> None:
        try:
            self.loop.submit(ServeRequest(name, None), name)
        except (self.modules.inbox.LoopClosedError, InvalidInputError):  # closed, or the id is in use
            self.refused[name] += 1
        else:
            self.accepted[name] += 1

    def do_submit(self) -> None:
        self.submit("c" if threading.current_thread() is self.main.thread else "d")

    def do_submit_again(self) -> None:
        self.submit("a")

    def do_raise(self) -> None:
        raise KeyboardInterrupt

    def do_cancel(self) -> None:
        self.loop.cancel("a")

    def do_begin_to_drain(self) -> None:
        self.do_drain(0.0)

    def do_drain(self, timeout_s: float | None = None) -> None:
        try:
            if self.loop.drain(timeout_s):
                self.early |= self.accepted.keys() - self.told.keys()
        except ServingError as error:
            self.expect(error, "would wait for the step", "another thread drives")

    def do_stop(self) -> None:
        self.loop.stop()

    def main_start(self) -> None:
        try:
            self.loop.start()
        except ServingError as error:
            self.expect(error, "the loop has stopped", "the loop runs already")
        self.submit("a")
        self.submit("b")
        self.loop.cancel("b")
        self.do_drain()
        self.loop.stop()

    def main_run_forever(self) -> None:
        self.submit("a")
        try:
            self.loop.run_forever()
        except ServingError as error:
            self.expect(error, "the loop has stopped", "the loop runs already")
        self.loop.stop()

    def main_step(self) -> None:
        self.submit("a")
        self.submit("b")
        try:
            while self.loop.num_unfinished:
                self.loop.step()
        except ServingError as error:
            self.expect(error, "the loop has stopped", "another thread drives")
        self.loop.stop()

    def main_drain(self) -> None:
        self.submit("a")
        self.do_drain()
        self.loop.stop()

    def expect(self, error: ServingError, *reasons: str) -> None:
        if not any(reason in str(error) for reason in reasons):
            raise error

    def check(self) -> None:
        """All has ended: each accepted request was told of once, a refused one never, and nothing is left."""
        assert self.loop.state.value == "stopped", "it has not stopped"
        assert self.loop.num_unfinished == 0, "requests are left"
        assert self.loop.error is None, repr(self.loop.error)
        assert self.told == self.accepted, (self.told, self.accepted, self.refused)
        assert not self.early, f"drained, and yet {self.early} left later"


def play(scene: Scene, plan: Plan) -> Baton:
    """Run the scene by the plan; an AssertionError names both."""
    stage, baton = Stage(scene), Baton(plan)
    try:
        baton.play(stage.begin)
        assert baton.failure is None, baton.failure
        stage.check()
    except AssertionError as error:
        raise AssertionError(f"{scene}; plan {dict(plan)}: {error}") from error
    return baton


def explore(scene: Scene, depth: int, keep: Callable[[], bool] = lambda: True, plan: Plan | None = None) -> int:
    """Run the scene by every plan of at most ``depth`` choices for which ``keep()``; return the number of runs."""
    plan = plan or {}
    baton = play(scene, plan)
    if len(plan) == depth:
        return 1
    chosen = [each for each in baton.alternatives if keep()]
    return 1 + sum(explore(scene, depth, keep, {**plan, point: choice}) for point, choice in chosen)


def sampler(share: float, seed: int) -> Callable[[], bool]:
    """Return a ``keep`` that takes that share of the choices."""
    rng = random.Random(seed)
    return lambda: rng.random() < share
