"""Worker teams, replay plans and comparisons of memory: bindings of ``executor.cpp``; pointers set at each call."""

from __future__ import annotations

import ctypes
import math
import weakref
from collections.abc import Mapping, Sequence
from copy import copy
from ctypes import addressof, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import torch
from mlsys_core.native import Kernel as Source
from mlsys_core.native import bind, new
from mlsys_nimble.backends.cpu.library import Kernel, load
from mlsys_nimble.ir.program import Program, ValueId, ValueType
from mlsys_nimble.planning.planner import Assignment, Piece
from mlsys_nimble.state.digest import address_arrays
from mlsys_nimble.state.forks import renew_in_forks
from mlsys_nimble.state.pages import Piece as Memory
from torch import Tensor

PIECE_S = 20e-6  # least work of one claim, seconds
SPINS = 3_000  # pauses that a worker waits before it sleeps: some tens of microseconds

_HERE = Path(__file__).parent
EXECUTOR = Source(_HERE / "executor.cpp", headers=(_HERE / "executor.h", _HERE / "resize.h", _HERE / "kernel.h"))


@cache
def load_executor() -> Any:
    """Load the library of teams and plans."""
    return bind(EXECUTOR.load())


class ReplayPlan:
    """Lists of bound kernels, one for each worker; it keeps the kernels alive.

    Args:
        assignment: Pieces of each worker.
        kernels: Kernels by job of the assignment.
        num_workers: Number of workers of the team that will run it, at least the number of lists.
        seconds: Time of each job on one thread. A task is claimed in pieces of at least :data:`PIECE_S`; a job
            without a time is claimed whole.
    """

    def __init__(
        self,
        assignment: Assignment,
        kernels: Mapping[int, Kernel],
        num_workers: int,
        seconds: Mapping[int, float] | None = None,
    ) -> None:
        native = load_executor()
        wait = native.structs["Wait"]
        self.handle: int = native.nimble_plan(num_workers)
        weakref.finalize(self, native.nimble_plan_free, self.handle)
        self.num_tasks = sum(map(len, assignment.lists))
        self._kernels = kernels
        for worker, pieces in enumerate(assignment.lists):
            for piece in pieces:
                kernel = kernels[piece.job]
                pairs = [new(wait, worker=other, count=count) for other, count in piece.waits]
                waits = (wait * len(pairs))(*pairs)
                begin, end = piece.units(kernel.units)
                took = (seconds or {}).get(piece.job, 0.0)
                grain = max(1, math.ceil(kernel.units * PIECE_S / took)) if took else end - begin
                native.nimble_plan_add(self.handle, worker, kernel.address, begin, end, grain, waits, len(waits))


class Team:
    """Workers that replay plans, one plan at a time: the caller's thread, and threads that sleep in between.

    A forked process has only the thread that forked: there the team starts its threads again at the next run.
    """

    def __init__(self, num_workers: int) -> None:
        self._native = load_executor()
        self._num_workers = num_workers
        self._handle: int | None = None
        self._run = self._native.nimble_run
        renew_in_forks(self)
        self._start()

    def run(self, plan: ReplayPlan) -> None:
        """Replay, and return when all tasks are done. The interpreter's lock is released meanwhile."""
        self._run(self._handle or self._start(), plan.handle)

    def run_timed(self, plan: ReplayPlan) -> Sequence[tuple[int, int]]:
        """Replay, and return each task's begin and end in nanoseconds of the steady clock, worker after worker."""
        times = (self._native.structs["Times"] * plan.num_tasks)()
        self._native.nimble_run_timed(self._handle or self._start(), plan.handle, times)
        return [(time.begin, time.end) for time in times]

    def renew(self) -> None:
        """Forget the workers in a forked child, where they do not exist and must not be waited for."""
        self._handle = None
        self._stop.detach()

    def _start(self) -> int:
        handle: int = self._native.nimble_team(self._num_workers, SPINS)
        self._stop = weakref.finalize(self, self._native.nimble_team_free, handle)
        self._handle = handle
        return handle


_NBYTES_PER_S = 10e9  # read by one thread; sizes a claim
_WORTH_NBYTES = 256 * 1024  # least size for which a second worker is woken


class Comparison:
    """Record of memory's bytes, which a team of workers compares with what they are.

    Args:
        pieces: Addresses and bytes; the caller keeps the memory alive.
        team: Workers that read them.
        num_workers: Their number.
    """

    def __init__(self, pieces: Sequence[Memory], team: Team, num_workers: int) -> None:
        self.nbytes = sum(nbytes for _, nbytes in pieces)
        self._has_changed = ctypes.c_int32(0)
        addresses, sizes = address_arrays(pieces)
        arguments = {
            "addresses": ctypes.addressof(addresses),
            "nbytes": ctypes.addressof(sizes),
            "count": len(pieces),
            "fault": ctypes.addressof(self._has_changed),
        }
        self._kernel = Kernel(load(), "comparison", arguments, fault=self._has_changed)
        shares = num_workers if self.nbytes >= _WORTH_NBYTES else 1
        lists = tuple((Piece(0, share, shares),) for share in range(shares))
        seconds = self.nbytes / _NBYTES_PER_S
        self._plan = ReplayPlan(Assignment(lists, seconds / shares), {0: self._kernel}, num_workers, {0: seconds})
        self._team = team

    def is_same(self, *, has_team: bool = True) -> bool:
        """Return whether all bytes are what they were; false ever after a look that found others.

        Args:
            has_team: Whether the team is idle and the caller's alone; if not, the caller reads all by itself.
        """
        if self.nbytes and has_team:
            self._team.run(self._plan)
        elif self.nbytes:
            self._kernel.run()
        return not self._has_changed.value


class Slots:
    """Table of one pointer for each input and each copied output.

    Args:
        program: Program after the layout; each output is an input, a constant, or a copy made for the caller.
    """

    def __init__(self, program: Program) -> None:
        self.inputs = {value: number for number, value in enumerate(program.inputs)}
        self._results = [  # each with a template: empty_like is three times as fast as empty
            (value, torch.empty(program.values[value].shape, dtype=getattr(torch, program.values[value].dtype)))
            for value in dict.fromkeys(program.outputs)
            if value not in self.inputs and value not in program.constants
        ]
        self.makes_all = [value for value, _ in self._results] == list(program.outputs)  # same order, each once
        self.input_types = [program.values[value] for value in program.inputs]
        owners = [*program.inputs, *(value for value, _ in self._results)]
        self._pointers = (c_void_p * max(len(owners), 1))()
        base = addressof(self._pointers)
        self.addresses = {value: base + 8 * number for number, value in enumerate(owners)}

    def resized(self, values: Sequence[ValueType]) -> Slots:
        """Return the same table for results of other sizes, by ValueId."""
        made = copy(self)
        made._results = [(value, like.new_empty(values[value].shape)) for value, like in self._results]
        return made

    def bind(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Point at a call's inputs; return the tensors that must be kept alive until it is over."""
        pointers = self._pointers
        kept: list[Tensor] = []
        for tensor in inputs:
            if tensor.is_conj() or tensor.is_neg():  # views that torch reads with another sign
                tensor = tensor.resolve_conj().resolve_neg()
            if not tensor.is_contiguous():
                tensor = tensor.contiguous()
            pointers[len(kept)] = tensor.data_ptr()
            kept.append(tensor)
        return kept

    def results(self) -> dict[ValueId, Tensor]:
        """Allocate a call's outputs, and point at them."""
        made: dict[ValueId, Tensor] = {}
        for number, (value, like) in enumerate(self._results, len(self.inputs)):
            made[value] = tensor = torch.empty_like(like)
            self._pointers[number] = tensor.data_ptr()
        return made
