"""Threads that run one at a time: a plan says at which access to shared state another goes on, or a signal comes.

The modules of the loop are loaded a second time, with a call before each access to an attribute that changes after
construction, and with queues, locks and threads that hand the baton on where the real ones would block. So a run is
decided by its plan alone, may be repeated, and ends with a deadlock that is seen instead of a test that hangs.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import logging
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from queue import Empty
from types import ModuleType, SimpleNamespace
from typing import Any

# Each imports only those before it.
MODULES = ("inbox", "workers", "inline", "many_workers", "dispatch", "executors", "serving_loop")
PATIENCE_S = 300.0
Action = Callable[[], object]
Choice = tuple[str, int]  # "run" or "signal", and the number of the actor


class Stopped(BaseException):
    """Unwinds an actor of a run that has failed."""


class Actor:
    """One thread: it runs when it has the baton."""

    def __init__(self, baton: Baton, name: str, run: Action, handler: Action | None, at_waits: bool) -> None:
        self.name, self.handler = name, handler  # the handler runs once, where the plan has the signal come
        self.at_waits = at_waits  # the signal comes only while it waits
        self.is_ready: Callable[[], bool] | None = None  # None: at work
        self.may_time_out = self.has_ended = self.is_signalled = False
        self.go = threading.Semaphore(0)
        self.thread = threading.Thread(target=baton.perform, args=(self, run), daemon=True)

    @property
    def can_run(self) -> bool:
        return not self.has_ended and (self.is_ready is None or self.is_ready())


class Baton:
    """One run. ``plan``: choices by the number of the point; everywhere else who runs goes on, then the first."""

    held: Baton | None = None

    def __init__(self, plan: Mapping[int, Choice]) -> None:
        self.plan, self.first_free = plan, max(plan, default=0) + 1
        self.actors: list[Actor] = []
        self.alternatives: list[tuple[int, Choice]] = []  # to what was done, at each point after the plan's last
        self.num_points = 0
        self.failure: str | None = None
        self._over = threading.Event()
        self._is_playing = False
        self._now: Actor

    def add(self, name: str, run: Action, handler: Action | None = None, *, at_waits: bool = False) -> Actor:
        self.actors.append(actor := Actor(self, name, run, handler, at_waits))
        actor.thread.start()
        return actor

    def play(self, begin: Callable[[Baton], None]) -> None:
        """Run the actors that ``begin`` adds until all have ended, or one has failed."""
        Baton.held = self
        try:
            begin(self)
            self._is_playing = True
            self._now = self.actors[0]
            self._now.go.release()
            if not self._over.wait(PATIENCE_S):
                self.failure = f"{self._now.name} blocks outside the baton"
        finally:
            Baton.held = None
            for actor in self.actors:
                actor.go.release()
                actor.thread.join(PATIENCE_S)

    def perform(self, actor: Actor, run: Action) -> None:
        actor.go.acquire()
        try:
            if self.failure is None and not self._over.is_set():
                self._deliver(actor)
                run()
        except Stopped:
            return
        except BaseException as error:  # noqa: BLE001 - told by the test
            self._fail(f"{actor.name} raised {error!r}")
        actor.has_ended = True
        if (after := self._next()) is not None:
            self._now = after
            after.go.release()

    def point(self, *, is_wait: bool = False) -> None:
        """Let the plan choose who goes on; before each access to shared state, and before each wait."""
        if not self._is_playing:
            return
        if self.failure is not None:
            raise Stopped
        me = self._now
        self.num_points += 1
        if self.num_points > 20_000:
            self._fail("it goes on forever")
            raise Stopped
        choice = self.plan.get(self.num_points)
        if choice is not None:
            self._obey(me, choice)
        elif self.num_points >= self.first_free:
            self.alternatives += [(self.num_points, choice) for choice in self._choices(me, is_wait)]

    def block(self, is_ready: Callable[[], bool], may_time_out: bool) -> bool:
        """Wait until ``is_ready()``; False: nothing else could happen but the end of the time."""
        self.point(is_wait=True)
        me = self._now
        while not is_ready():
            me.is_ready, me.may_time_out = is_ready, may_time_out
            after = self._next()
            if after is None:
                raise Stopped
            if after is not me:
                self._hand_to(after, me)
            me.is_ready, timed_out, me.may_time_out = None, may_time_out and not me.may_time_out, False
            self._deliver(me)
            if timed_out and not is_ready():
                return False
        return True

    def _choices(self, me: Actor, is_wait: bool) -> Iterator[Choice]:
        for number, actor in enumerate(self.actors):
            if actor is not me and actor.can_run:
                yield "run", number
            waits = is_wait if actor is me else actor.is_ready is not None
            if actor.handler is not None and not actor.has_ended and (waits or not actor.at_waits):
                yield "signal", number

    def _obey(self, me: Actor, choice: Choice) -> None:
        kind, number = choice
        actor = self.actors[number]
        actor.is_signalled |= kind == "signal"
        if actor is not me:
            self._hand_to(actor, me)
        self._deliver(me)

    def _hand_to(self, actor: Actor, me: Actor) -> None:
        self._now = actor
        actor.go.release()
        me.go.acquire()
        if self.failure is not None:
            raise Stopped

    def _deliver(self, me: Actor) -> None:
        if me.is_signalled and me.handler is not None:
            handler, me.handler = me.handler, None
            handler()

    def _next(self) -> Actor | None:
        """Return who goes on where the actor at work cannot; time passes only when nothing else can happen."""
        alive = [actor for actor in self.actors if not actor.has_ended]
        for actor in alive:
            if actor.can_run:
                return actor
        for actor in alive:
            if actor.handler is not None:
                actor.is_signalled = True
                return actor
        for actor in alive:
            if actor.may_time_out:
                actor.may_time_out = False
                return actor
        if alive and self.failure is None:
            self._fail(f"deadlock of {', '.join(actor.name for actor in alive)}")
        self._over.set()
        return None

    def _fail(self, why: str) -> None:
        self.failure = self.failure or why
        self._over.set()


def point(owner: Any) -> Any:
    """Return ``owner``; what the loaded modules call before an access to its state."""
    if Baton.held is not None:
        Baton.held.point()
    return owner


def _block(is_ready: Callable[[], bool], may_time_out: bool) -> bool:
    return is_ready() if Baton.held is None else Baton.held.block(is_ready, may_time_out)


class Queue(deque[Any]):
    """``queue.SimpleQueue``."""

    def put(self, item: Any) -> None:
        point(self).append(item)

    def get(self, timeout: float | None = None) -> Any:
        if not _block(lambda: len(self) > 0, timeout is not None):
            raise Empty
        return self.popleft()

    def get_nowait(self) -> Any:
        if not point(self):
            raise Empty
        return self.popleft()

    def empty(self) -> bool:
        return not point(self)


class Lock:
    """``threading.Lock``."""

    def __init__(self) -> None:
        self._is_held = False

    def acquire(self, blocking: bool = True) -> bool:
        if blocking:
            _block(lambda: not self._is_held, may_time_out=False)
        elif point(self)._is_held:
            return False
        self._is_held = True
        return True

    def release(self) -> None:
        point(self)._is_held = False

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class Thread:
    """``threading.Thread``."""

    def __init__(self, target: Callable[..., object], args: Any = (), kwargs: Any = None, **_: object) -> None:
        self._run = functools.partial(target, *args, **(kwargs or {}))
        self._actor: Actor | None = None

    def start(self) -> None:
        if Baton.held is not None:
            self._actor = Baton.held.add(f"thread of {self._run.func.__name__}", self._run)
            Baton.held.point()

    def join(self, timeout: float | None = None) -> None:
        actor = self._actor
        if actor is not None:
            _block(lambda: actor.has_ended, timeout is not None)


THREADING = SimpleNamespace(
    Thread=Thread,
    Lock=Lock,
    get_ident=threading.get_ident,
    current_thread=threading.current_thread,
    main_thread=threading.main_thread,
    TIMEOUT_MAX=threading.TIMEOUT_MAX,
)


class _Points(ast.NodeTransformer):
    """Puts a call of ``point`` around ``self`` where an attribute that changes is read or written."""

    def __init__(self, changing: set[str]) -> None:
        self._changing = changing

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        if node.attr in self._changing and isinstance(node.value, ast.Name) and node.value.id == "self":
            node.value = ast.Call(ast.Name("__point__", ast.Load()), [node.value], [])
        return node


def _changing(tree: ast.Module) -> set[str]:
    """Return the attributes that are written outside constructors, or hold a container."""
    found: set[str] = set()
    for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
        for node in ast.walk(function):
            if not isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
                continue
            value = node.value
            is_container = isinstance(value, ast.Dict | ast.List) or (
                isinstance(value, ast.Call) and getattr(value.func, "id", "") == "deque"
            )
            if function.name != "__init__" or is_container:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                leaves = (leaf for target in targets for leaf in ast.walk(target))
                found |= {leaf.attr for leaf in leaves if isinstance(leaf, ast.Attribute)}
    return found


@functools.cache
def load() -> SimpleNamespace:
    """Return the loop's modules with points in them, by name."""
    real = {name: importlib.import_module(f"mlsys_core.loop.{name}") for name in MODULES}
    loaded = {}
    silent = logging.Logger("silent", logging.CRITICAL + 1)
    try:
        for name, module in real.items():
            tree = ast.parse(inspect.getsource(module))
            if name != "dispatch":  # its state is the runner's own
                tree = ast.fix_missing_locations(_Points(_changing(tree)).visit(tree))
            copy = ModuleType(module.__name__)
            copy.__dict__.update(__point__=point, __file__=module.__file__)
            sys.modules[module.__name__] = loaded[name] = copy
            exec(compile(tree, str(module.__file__), "exec"), copy.__dict__)
            for key, fake in {"SimpleQueue": Queue, "threading": THREADING}.items():
                if key in copy.__dict__:
                    copy.__dict__[key] = fake
            copy.__dict__["_logger"] = silent
    finally:
        for module in real.values():
            sys.modules[module.__name__] = module
    return SimpleNamespace(**loaded)
