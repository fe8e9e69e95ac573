"""Detection of changes to a model after its schedule was made.

Kernels read packed copies of weights, and passes fold several into one. A write through torch raises a tensor's
version; one through ``.data``, NumPy or another process changes only the bytes. So each replay first checks that
modules hold the same tensors, submodules, numbers and tuples of numbers, that tensors have the same addresses and
versions, and that the bytes that the schedule copied are the same: all of them (ADR 15), or those on pages that the
system reports as written (ADR 15).
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Collection, Iterable, Sequence
from ctypes import PyDLL, c_int64, c_void_p
from functools import cache, partial
from operator import attrgetter
from threading import Lock
from typing import Any

import torch
from mlsys_core.posix.machine import private_memory
from mlsys_nimble.ir.program import Program, ValueId
from mlsys_nimble.state.digest import Comparing, Digest, Unchanged, load_digest, pieces_of
from mlsys_nimble.state.guard import page_book, refusal
from mlsys_nimble.state.pages import Hold, PageBook, Piece, Range, pieces_without, whole_pages
from torch import Tensor, nn

LEAST_NBYTES = 32 * 1024  # of a tensor, below which reading it is as fast as asking


class Watched:
    """Record of tensors' bytes. Pages that the system guards are read only if they may have been written.

    Where it guards none, all bytes are read at each look.

    Args:
        tensors: As for :class:`~mlsys_nimble.state.digest.Digest`.
        compare: Return a record of the present bytes of some memory.
        book: Where pages are guarded; None: nowhere.
    """

    def __init__(
        self, tensors: Sequence[Tensor], compare: Callable[[Sequence[Piece]], Unchanged], book: PageBook | None
    ) -> None:
        self._tensors = list(tensors)
        self._pieces = pieces_of(tensors)
        self._at: tuple[PageBook, Hold] | None = None
        self._known: tuple[Hold, int] | None = None  # the book's number after which all bytes were as they had been
        if book is not None:
            self._hold(book)
        self._ranges: list[Range] = self._at[1].ranges if self._at else []
        self.whole = compare(self._pieces)  # read now that writes are reported
        self._rest = compare(pieces_without(self._pieces, self._ranges)) if self._ranges else self.whole

    @property
    def nbytes(self) -> int:
        """Return how many bytes a look reads, at least."""
        return (self._rest if self._at else self.whole).nbytes

    @property
    def guarded_nbytes(self) -> int:
        """Return how many bytes the system guards."""
        return self._at[1].nbytes if self._at else 0

    @property
    def is_calm(self) -> bool:
        """Return whether the next look trusts the system, if nothing is written before."""
        return self._at is not None and self._known == (self._at[1], self._at[0].look(self._at[1]))

    def is_same(self, *, has_team: bool = False) -> bool:
        """See :class:`~mlsys_nimble.state.digest.Unchanged`."""
        if self._at is None:
            return self.whole.is_same(has_team=has_team)
        book, hold = self._at
        if not book.guard.is_own():
            self._renew()
            return self.whole.is_same(has_team=has_team)
        answer = book.look(hold)
        if answer is not None and self._known == (hold, answer):
            return self._rest.is_same(has_team=has_team)
        if hold.is_lost:
            self._at = None
        if not self.whole.is_same(has_team=has_team):
            return False
        if answer is not None:
            if any(tensor.is_pinned() for tensor in self._tensors):  # a device may write without a page fault
                self._at = None
            else:
                self._known = hold, answer
        return True

    def _hold(self, book: PageBook) -> None:
        if any(tensor.is_pinned() for tensor in self._tensors):
            return
        ranges = whole_pages(self._pieces, private_memory(), page_nbytes=mmap.PAGESIZE, least_nbytes=LEAST_NBYTES)
        hold = book.hold(ranges) if ranges else None
        self._at = (book, hold) if hold else None

    def _renew(self) -> None:
        """Guard the same ranges in a forked process; if that is impossible, compare all bytes from now on."""
        self._at = None
        book = page_book()
        if book is not None:
            self._hold(book)
        if self._at is not None and self._at[1].ranges != self._ranges:
            self._at = None


_WATCHED = (torch.Tensor, nn.Module, bool, int, float, complex, str, type(None), torch.dtype)
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_PLAIN = frozenset({bool, int, float, complex, str, tuple})
_NOT_WATCHED = frozenset(vars(nn.Module())) | {"training"}  # the entries of its dictionaries are watched instead
_ABSENT: Any = object()  # stands for an entry that a dictionary no longer has
_ADDRESS, _VERSION = torch.Tensor.data_ptr, attrgetter("_version")


class Watch:
    """Record of the model that a schedule was made from; :meth:`has_changed` compares it with the present one.

    Args:
        model: Model whose parameters, buffers, submodules and plain attributes must stay the same objects.
        constants: Tensors that the schedule took from the model. Their addresses must stay the same.
        copied: Tensors that the schedule copied. Their content must stay the same.
        weights: The option of that name: ``"bytes"`` compares every byte, ``"pages"`` those that may have been
            written. Tensors on other devices are compared by versions.
        executor: What replays the schedule; if it is :class:`~mlsys_nimble.state.digest.Comparing`, its workers
            compare bytes together.
        ignored: Attributes, by dictionary and key, that may become other objects.
    """

    def __init__(
        self,
        model: Any,
        constants: Iterable[torch.Tensor],
        copied: Iterable[torch.Tensor],
        *,
        weights: str = "pages",
        executor: Any = None,
        ignored: Iterable[tuple[Any, Any]] = (),
    ) -> None:
        self._asks_system = weights == "pages"
        self._attributes = Attributes(model, ignored)
        self._tensors = list({id(tensor): tensor for tensor in constants}.values())
        self._addresses = list(map(_ADDRESS, self._tensors))
        copied = list({id(tensor): tensor for tensor in copied}.values())
        on_host = [tensor for tensor in copied if tensor.device.type == "cpu"]
        compare = partial(_compare, executor)
        self._watched = Watched(on_host, compare, page_book() if self._asks_system and on_host else None)
        self._versioned = [each for each in copied if each.device.type != "cpu" and not each.is_inference()]
        self._versions = list(map(_VERSION, self._versioned))

    @property
    def nbytes(self) -> int:
        """Return the number of bytes that each check reads, at least."""
        return self._watched.nbytes

    @property
    def is_calm(self) -> bool:
        """Return whether the next check reads no page that the system guards, if nobody writes before."""
        return self._watched.is_calm or not self._watched.guarded_nbytes

    def __str__(self) -> str:
        guarded = self._watched.guarded_nbytes
        if guarded:
            return f"{_mib(guarded)} MiB of weights guarded by the system, {_mib(self.nbytes)} compared"
        reason = refusal() if self._asks_system else ""
        return f"{_mib(self.nbytes)} MiB of weights compared{f' ({reason})' if reason else ''}"

    def has_changed(self, *, looks_at_all: bool = False, turn: Lock | None = None) -> bool:
        """Return whether the model has changed since the schedule was made.

        Args:
            looks_at_all: Compare every byte.
            turn: Held by who runs the executor: its workers help if nobody does.
        """
        if self._attributes.have_changed():
            return True
        if list(map(_ADDRESS, self._tensors)) != self._addresses:
            return True
        if list(map(_VERSION, self._versioned)) != self._versions:
            return True
        return not _is_same(self._watched.whole if looks_at_all else self._watched, turn)


def _is_same(bytes_: Unchanged, turn: Lock | None) -> bool:
    if turn is None or not turn.acquire(blocking=False):
        return bytes_.is_same(has_team=False)
    try:
        return bytes_.is_same(has_team=True)
    finally:
        turn.release()


def _compare(executor: Any, pieces: Sequence[Piece]) -> Unchanged:
    return executor.compare(pieces) if isinstance(executor, Comparing) and pieces else Digest(pieces=pieces)


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.3g}"


class Attributes:
    """Parameters, buffers, submodules and plain attributes of a model's modules, as they were.

    Args:
        model: The model; what is no ``nn.Module`` has none.
        ignored: Attributes, by dictionary and key, that may become other objects.
    """

    def __init__(self, model: Any, ignored: Iterable[tuple[Any, Any]] = ()) -> None:
        free = {(id(held), key) for held, key in ignored}
        found = [each for each in _watched_attributes(model) if (id(each[0]), each[1]) not in free]
        self._dictionaries = [attribute[0] for attribute in found]
        self._keys = [attribute[1] for attribute in found]
        self._held = [attribute[2] for attribute in found]
        array = c_void_p * max(len(found), 1)
        self._objects = array(*map(id, self._held))  # ids are addresses
        self._arguments = array(*map(id, self._dictionaries)), array(*map(id, self._keys)), self._objects
        self._count = c_int64(len(found))
        self._first_changed = _compiled("nimble_first_changed", 4)
        self._first_resized = _compiled("nimble_first_resized", 3)
        self._grown = list(_growing(model))
        self._sizes = list(map(len, self._grown))
        array, numbers = c_void_p * max(len(self._grown), 1), c_int64 * max(len(self._grown), 1)
        self._all_grown = array(*map(id, self._grown)), numbers(*self._sizes), c_int64(len(self._grown))

    def have_changed(self) -> bool:
        """Return whether one is another object, and no equal number or string."""
        if self._first_resized is not None:
            if self._first_resized(*self._all_grown) < len(self._grown):
                return True
        elif list(map(len, self._grown)) != self._sizes:
            return True
        if self._first_changed is not None:
            found = self._first_changed(*self._arguments, self._count)
            if found == len(self._held):
                return False
        for number, (dictionary, key) in enumerate(zip(self._dictionaries, self._keys, strict=True)):
            found, held = dictionary.get(key, _ABSENT), self._held[number]
            if found is held:
                continue
            if not _are_equal(found, held):
                return True
            self._held[number], self._objects[number] = found, id(found)
        return False


@cache
def _compiled(name: str, num_arguments: int) -> Any:
    """Return a compiled comparison of dictionaries; None where there is none."""
    native = load_digest()
    if native is None:
        return None
    function = getattr(PyDLL(native._name, handle=native._handle), name)  # with the interpreter's lock
    function.restype = c_int64
    return function if function(*[None] * (num_arguments - 1), c_int64(0)) == 0 else None


def _watched_attributes(model: Any) -> Iterable[tuple[dict[str, Any], str, Any]]:
    """Yield the attributes that decide modules' results: (the dictionary, the key, the value)."""
    for module in model.modules() if isinstance(model, nn.Module) else ():
        hooks = module._forward_hooks, module._forward_pre_hooks
        entries: tuple[Any, ...] = (module._parameters, module._buffers, module._modules, *hooks)
        for held in entries:
            if isinstance(held, dict):  # TorchScript's are views of objects in C++
                yield from ((held, key, value) for key, value in held.items())
        own = vars(module)
        if not isinstance(module, torch.jit.ScriptModule):
            yield from _globals_read(type(module).forward)
        yield from ((own, key, value) for key, value in own.items() if key not in _NOT_WATCHED and _is_watched(value))


def _globals_read(function: Any) -> Iterable[tuple[dict[str, Any], str, Any]]:
    """Yield the numbers, tensors and modules among the global names that a function reads, in the form of the above."""
    scope = getattr(function, "__globals__", {})
    if str(scope.get("__name__", "")).partition(".")[0] == "torch":
        return
    for name in getattr(getattr(function, "__code__", None), "co_names", ()):
        if name in scope and _is_watched(scope[name]):
            yield scope, name, scope[name]


def _are_equal(found: Any, held: Any) -> bool:
    """Return whether two objects are equal numbers, strings or tuples of them, of the same types."""
    if type(found) is not type(held) or type(held) not in _PLAIN:
        return False
    if type(held) is tuple:
        return len(found) == len(held) and all(a is b or _are_equal(a, b) for a, b in zip(found, held, strict=True))
    return bool(found == held)


def _is_watched(value: Any) -> bool:
    if type(value) is tuple:  # a convolution's stride
        return all((type(part) in _PLAIN and _is_watched(part)) or part is None for part in value)
    return isinstance(value, _WATCHED)


def _growing(model: Any) -> Iterable[dict[Any, Any]]:
    """Yield the dictionaries in which a new entry may change modules' results."""
    for module in model.modules() if isinstance(model, nn.Module) else ():
        is_layer = type(module).__module__.startswith("torch.nn.modules.") and not module._modules
        if isinstance(module._modules, dict) and (not is_layer or isinstance(module, _CONTAINERS)):
            yield module._modules
        yield module._forward_hooks
        yield module._forward_pre_hooks
        yield vars(module)  # an entry of it hides a submodule, a parameter or forward


def copied_constants(captured: Program, final: Program, copies: Collection[ValueId]) -> list[torch.Tensor]:
    """Return the constants whose bytes a schedule has copied: those that a pass folded, and those that kernels packed.

    A constant is read in place if each operator that read it when the model was captured still does, and no kernel has
    packed it. Constants that a call writes to are read in place, too.

    Args:
        captured: Program before the passes.
        final: Program of the executor; its operators have the names of the captured ones.
        copies: Constants of the final program that the executor has copied.
    """
    readers = {
        (operator.name, id(final.constants[value]))
        for operator in final.operators
        for value in operator.inputs
        if value in final.constants and value not in copies
    }
    written = {old for old, _ in captured.mutations}
    in_place = set(captured.constants) - written
    for operator in captured.operators:
        for value in operator.inputs:
            if value in in_place and (operator.name, id(captured.constants[value])) not in readers:
                in_place.discard(value)
    return [tensor for value, tensor in captured.constants.items() if value not in in_place | written]
