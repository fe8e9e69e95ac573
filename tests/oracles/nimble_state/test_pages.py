"""Writes of every kind to guarded pages are seen, by the verdict of a comparison of all bytes."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from mlsys_nimble import Nimble
from mlsys_nimble.state import guard
from mlsys_nimble.state.digest import Digest, load_digest
from mlsys_nimble.state.guard import SystemGuard
from mlsys_nimble.state.pages import SETTLE_S, PageBook
from mlsys_nimble.state.weights import Watched
from torch import Tensor, nn

from tests.processes import FAULT_S

PAGE = mmap.PAGESIZE
LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.mmap.restype = ctypes.c_void_p
MAP_FIXED = 0x10

pytestmark = pytest.mark.skipif(bool(guard.refusal()), reason=f"not here: {guard.refusal()}")


class Clock:
    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def book(clock: Clock) -> PageBook:
    return PageBook(SystemGuard(load_digest()), clock)


class Reader(Digest):
    """Digest that counts its looks."""

    num_looks = 0

    def is_same(self, *, has_team: bool = False) -> bool:
        self.num_looks += 1
        return super().is_same(has_team=has_team)


class Watcher:
    """Record of tensors, beside a copy of all bytes."""

    def __init__(self, tensors: list[Tensor], book: PageBook | None) -> None:
        self.tensors = tensors
        self.watched = Watched(tensors, lambda pieces: Reader(pieces=pieces), book)
        self.copies = [tensor.clone() for tensor in tensors]

    def is_same(self) -> bool:
        """Return the verdict, which must be that of the copies."""
        is_same = self.watched.is_same()
        assert is_same == all(map(torch.equal, self.tensors, self.copies))
        return is_same

    @property
    def num_whole(self) -> int:
        assert isinstance(self.watched.whole, Reader)
        return self.watched.whole.num_looks

    def rest(self, clock: Clock) -> None:
        """Look until the system is trusted."""
        for _ in range(20):  # three, unless the system moves a page meanwhile
            assert self.is_same()
            clock.seconds += SETTLE_S
            if self.watched.is_calm:
                break
        assert self.watched.is_calm
        before = self.num_whole
        assert self.is_same()
        assert self.num_whole == before


def private(nbytes: int, *, is_huge: bool = False) -> Tensor:
    """Return bytes in a mapping of their own."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if is_huge:
        memory.madvise(mmap.MADV_HUGEPAGE)
    tensor = torch.frombuffer(memory, dtype=torch.uint8)
    return tensor.random_(1, 255)


def by_file(tensor: Tensor, at: int, value: int) -> None:
    with Path("/proc/self/mem").open("r+b", buffering=0) as file:
        file.seek(tensor.data_ptr() + at)
        file.write(bytes([value]))


def by_reading(tensor: Tensor, at: int, value: int) -> None:
    read, write = os.pipe()
    os.write(write, bytes([value]))
    with os.fdopen(read, "rb", buffering=0) as file:
        file.readinto(memoryview(tensor.numpy())[at : at + 1])
    os.close(write)


class Vector(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


def by_another_process(tensor: Tensor, at: int, value: int) -> None:
    parent, byte = os.getpid(), ctypes.c_uint8(value)
    own = Vector(ctypes.addressof(byte), 1)
    other = Vector(tensor.data_ptr() + at, 1)
    child = os.fork()
    if not child:
        written = LIBC.process_vm_writev(parent, ctypes.byref(own), 1, ctypes.byref(other), 1, 0)
        os._exit(0 if written == 1 else 1)
    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
        pytest.skip("a process may not write to another here")


def by_a_thread(tensor: Tensor, at: int, value: int) -> None:
    thread = threading.Thread(target=lambda: tensor.numpy().__setitem__(at, value))
    thread.start()
    thread.join()


def by_memmove(tensor: Tensor, at: int, value: int) -> None:
    ctypes.memmove(tensor.data_ptr() + at, bytes([value]), 1)


WRITES: dict[str, Callable[[Tensor, int, int], Any]] = {
    ".data": lambda tensor, at, value: tensor.data[at].fill_(value),
    "NumPy": lambda tensor, at, value: tensor.numpy().__setitem__(at, value),
    "memmove": by_memmove,
    "a tensor of the same memory": lambda tensor, at, value: (
        torch.from_numpy(tensor.numpy()).fill_(value)
        if at < 0
        else torch.frombuffer(memoryview(tensor.numpy()), dtype=torch.uint8)[at].fill_(value)
    ),
    "/proc/self/mem": by_file,
    "readinto": by_reading,
    "process_vm_writev": by_another_process,
    "a thread": by_a_thread,
}


@pytest.mark.parametrize("way", WRITES)
@pytest.mark.parametrize("kind", ["small pages", "huge pages", "torch's"])
def test_each_way_of_writing_is_seen(way: str, kind: str, book: PageBook, clock: Clock):
    nbytes = 6 << 20
    tensor = (
        torch.randint(1, 255, (nbytes,), dtype=torch.uint8)
        if kind == "torch's"
        else private(nbytes, is_huge=kind == "huge pages")
    )
    watcher = Watcher([tensor], book)
    assert watcher.watched.guarded_nbytes > nbytes - 2 * PAGE
    for at in (0, 3 * PAGE - 1, nbytes - 1, (4 << 20) + 5):
        watcher.rest(clock)
        value = int(tensor[at])
        WRITES[way](tensor, at, value ^ 1)
        assert not watcher.is_same()
        WRITES[way](tensor, at, value)
        assert watcher.is_same()
    watcher.rest(clock)


def test_direct_input_is_seen(book: PageBook, clock: Clock, tmp_path: Path):
    path = tmp_path / "weights"
    path.write_bytes(bytes(range(256)) * (PAGE // 256))
    try:
        file = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError as error:
        pytest.skip(f"files of {tmp_path} cannot be read past the cache: {error}")
    tensor = private(64 * PAGE)
    watcher = Watcher([tensor], book)
    watcher.rest(clock)
    os.preadv(file, [memoryview(tensor.numpy())[5 * PAGE : 6 * PAGE]], 0)
    os.close(file)
    assert not watcher.is_same()


def throw_away(tensor: Tensor, nbytes: int) -> None:
    assert LIBC.madvise(ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(nbytes), mmap.MADV_DONTNEED) == 0


def map_anew(tensor: Tensor, nbytes: int) -> None:
    address = ctypes.c_void_p(tensor.data_ptr())
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_FIXED
    assert LIBC.mmap(address, ctypes.c_size_t(nbytes), 3, flags, -1, ctypes.c_long(0)) == address.value


@pytest.mark.parametrize("change", [throw_away, map_anew])
@pytest.mark.parametrize("is_huge", [False, True])
@pytest.mark.parametrize("nbytes", [PAGE, 6 << 20])
def test_pages_that_are_exchanged_are_seen(
    change: Callable[[Tensor, int], None], nbytes: int, is_huge: bool, book: PageBook, clock: Clock
):
    tensor = private(8 << 20, is_huge=is_huge)
    watcher = Watcher([tensor], book)
    watcher.rest(clock)
    change(tensor, nbytes)
    assert not watcher.is_same()
    tensor.copy_(watcher.copies[0])
    for _ in range(3):
        assert watcher.is_same()
        clock.seconds += SETTLE_S
    tensor.numpy()[7] ^= 1
    assert not watcher.is_same()


def test_memory_that_others_may_write_to_is_compared(book: PageBook, tmp_path: Path):
    path = tmp_path / "weights"
    path.write_bytes(bytes(64 * PAGE))
    shared = torch.zeros(64 * PAGE, dtype=torch.uint8).share_memory_()
    file = torch.from_file(str(path), shared=False, size=64 * PAGE, dtype=torch.uint8)
    watcher = Watcher([shared, file], book)
    assert not watcher.watched.guarded_nbytes
    assert watcher.is_same()
    with path.open("r+b") as opened:
        opened.write(b"1")
    assert not watcher.is_same()


def test_writes_of_a_child_change_nothing_and_the_parents_are_seen_while_it_lives(book: PageBook, clock: Clock):
    tensor = private(64 * PAGE)
    watcher = Watcher([tensor], book)
    watcher.rest(clock)
    child = os.fork()
    if not child:
        tensor.numpy()[9 * PAGE] ^= 1
        signal.pause()
        os._exit(0)
    try:
        assert watcher.is_same()
        tensor.numpy()[9 * PAGE] ^= 1
        assert not watcher.is_same()
        tensor.numpy()[9 * PAGE] ^= 1
        watcher.rest(clock)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def check_child(fork: Callable[[], int]) -> None:
    """Look in a child, which compares until it has its own guard, and then in its parent."""
    clock = Clock()
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(guard.time, "monotonic", clock)
        process = guard.ProcessPages()
        monkeypatch.setattr(guard, "_process", lambda: process)
        tensor = private(64 * PAGE)
        watcher = Watcher([tensor], guard.page_book())
        watcher.rest(clock)
        child = fork()
        if not child:
            found = 1
            try:
                before = watcher.num_whole
                assert watcher.is_same()
                assert watcher.num_whole == before + 1
                watcher.rest(clock)
                tensor.numpy()[9 * PAGE] ^= 1
                assert not watcher.is_same()
                found = 0
            finally:
                os._exit(found)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert watcher.watched.is_calm
        assert watcher.is_same()


def test_a_child_compares_until_it_has_its_own_guard():
    check_child(os.fork)


def test_a_child_of_the_c_library_does_so_too():
    """In a process of one Python thread: in the child of others nobody would give the interpreter's lock back."""
    code = f"import ctypes; from {__name__} import check_child; check_child(ctypes.PyDLL(None).fork)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=FAULT_S, cwd=Path(__file__).parents[3])


def test_writes_beside_looks_are_seen(book: PageBook):
    """A thread writes, says so, and the next look sees it, while two others look all the time."""
    tensor = private(256 * PAGE)
    book._clock = lambda: clock_value[0]
    clock_value = [0.0]
    watchers = [Watched([tensor], lambda pieces: Reader(pieces=pieces), book) for _ in range(3)]
    stop = threading.Event()

    def look(watched: Watched) -> None:
        while not stop.is_set():
            watched.is_same()
            clock_value[0] += SETTLE_S

    threads = [threading.Thread(target=look, args=(each,)) for each in watchers[1:]]
    for thread in threads:
        thread.start()
    choose, array = random.Random(0), tensor.numpy()
    try:
        for _ in range(200):
            at = choose.randrange(tensor.numel())
            array[at] ^= 1
            assert not watchers[0].is_same()
            array[at] ^= 1
            assert watchers[0].is_same()
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def programs(seed: int, book: PageBook, clock: Clock) -> int:
    """Run one random program of writes and looks; return the looks that trusted the system."""
    choose = random.Random(seed)
    base = torch.randint(0, 255, (40 * PAGE,), dtype=torch.uint8)
    tensors = [
        base,
        base[3 * PAGE + 5 : 30 * PAGE],
        torch.randint(0, 255, (100,), dtype=torch.uint8),
        private(20 * PAGE),
    ]
    tensors.append(torch.randint(0, 255, (9 * PAGE + 13,), dtype=torch.uint8))
    watchers = [Watcher(choose.sample(tensors, choose.randint(1, 4)), book) for _ in range(2)]
    num_trusted = 0
    ways = [way for name, way in WRITES.items() if name != "process_vm_writev" or choose.random() < 0.05]
    for _ in range(choose.randint(5, 40)):
        step = choose.random()
        tensor = choose.choice(tensors)
        at = choose.choice([choose.randrange(tensor.numel()), choose.randrange(tensor.numel()) // PAGE * PAGE, 0])
        if step < 0.3:
            choose.choice(ways)(tensor, at, choose.choice([int(tensor[at]), choose.randrange(255)]))
        elif step < 0.35:
            end = at + choose.randrange(3 * PAGE)
            tensor.data[at:end] = tensor.data[at:end].flip(0)
        elif step < 0.42:  # what was changed is changed back
            for watcher in watchers:
                for own, copy in zip(watcher.tensors, watcher.copies, strict=True):
                    own.data.copy_(copy)
        elif step < 0.46 and tensor.data_ptr() % PAGE == 0 and tensor.numel() >= PAGE:  # of nobody else's bytes
            throw_away(tensor, PAGE)
        elif step < 0.52:
            watchers[choose.randrange(2)] = Watcher(choose.sample(tensors, choose.randint(1, 4)), book)
        elif step < 0.56:  # freed, and perhaps allocated again in the same place
            old = tensors.pop()
            watchers = [Watcher([*tensors[:1], *tensors[2:]], book) for _ in range(2)]
            tensors.append(torch.empty(old.numel(), dtype=torch.uint8).random_(0, 255))
        else:
            clock.seconds += choose.choice([0.1, SETTLE_S, SETTLE_S])
        for watcher in watchers:
            if choose.random() < 0.7:
                before = watcher.num_whole
                watcher.is_same()
                num_trusted += watcher.watched.guarded_nbytes > 0 and watcher.num_whole == before
    for watcher in watchers:
        watcher.is_same()
    return num_trusted


def test_random_programs_have_the_verdict_of_all_bytes(book: PageBook, clock: Clock):
    found = [programs(seed, book, clock) for seed in range(int(os.environ.get("MLSYS_PAGES_PROGRAMS", "100")))]
    assert sum(found) > len(found)
    gc.collect()
    tensor = private(8 * PAGE)  # takes the lock, and forgets what was dropped meanwhile
    kept = book.hold([(tensor.data_ptr(), tensor.data_ptr() + PAGE)])
    assert kept is not None
    assert list(book._spans) == kept.ranges


def test_pinned_tensors_are_compared(book: PageBook, clock: Clock, monkeypatch: pytest.MonkeyPatch):
    tensor = private(64 * PAGE)
    watcher = Watcher([tensor], book)
    assert watcher.is_same()
    clock.seconds += SETTLE_S
    monkeypatch.setattr(Tensor, "is_pinned", lambda _: True)  # registered by cudaHostRegister since
    assert watcher.is_same()
    assert not watcher.watched.guarded_nbytes
    assert not Watched([tensor], lambda pieces: Reader(pieces=pieces), book).guarded_nbytes


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(256, 512), nn.Linear(512, 256)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(self.first(x).relu())
        return y


@pytest.fixture
def process_clock(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> Clock:
    """Return the clock of a book that stands in for the process's."""
    book, reason = guard._make_book()
    assert book is not None
    assert not reason
    book._clock = clock
    monkeypatch.setattr("mlsys_nimble.state.weights.page_book", lambda: book)
    return clock


@pytest.mark.parametrize("executor", ["native", "reference"])
def test_prepared_models_notice_after_they_have_trusted(process_clock: Clock, executor: str):
    torch.manual_seed(0)
    model, x = Wide().eval(), torch.randn(2, 256)
    prepared = Nimble(model).prepare(x, executor=executor)
    other = Nimble(model).prepare(x, executor=executor, weights="bytes")
    for turn in range(3):
        for _ in range(3):
            prepared(x)
            process_clock.seconds += SETTLE_S
        assert prepared.prepared is not None
        watch, first = prepared.prepared.watch, prepared.prepared
        assert watch.is_calm
        if executor == "native":
            assert "guarded by the system" in str(watch)
            assert watch.nbytes < 100_000
        torch.testing.assert_close(prepared(x), other(x))
        assert prepared.prepared is first
        with torch.no_grad():
            model.second.weight.data.numpy()[100 + turn, 200] += 5
            expected = model(x)
        torch.testing.assert_close(prepared(x), expected, rtol=1e-4, atol=1e-4)


def test_systems_without_it_compare(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(guard, "load_digest", lambda: None)
    assert guard._make_book() == (None, "there is no C++ compiler")

    class Refusing(SystemGuard):
        def __init__(self, native: Any) -> None:
            raise PermissionError(1, "Operation not permitted")

    class Blind(SystemGuard):
        def scan(self, target: Any) -> None:
            return None

    monkeypatch.undo()
    monkeypatch.setattr(guard, "SystemGuard", Refusing)
    assert guard._make_book() == (None, "the kernel does not report written pages: Operation not permitted")
    monkeypatch.setattr(guard, "SystemGuard", Blind)
    assert guard._make_book() == (None, "the kernel reports written pages wrongly")
    model = Wide().eval()
    process = guard.ProcessPages()
    monkeypatch.setattr(guard, "_process", lambda: process)
    prepared = Nimble(model).prepare(torch.randn(2, 256))
    assert prepared.prepared is not None
    assert "compared (the kernel reports written pages wrongly)" in str(prepared.prepared.watch)


@pytest.mark.skipif(os.getuid() != 0, reason="this user has none")
@pytest.mark.parametrize("is_dumpable", [True, False])
def test_users_without_privileges_may_and_who_may_not_read_its_own_pages_compares(is_dumpable: bool):
    """A process that has just changed its user may not open its own /proc/self/pagemap."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.setgid(65534)
        os.setuid(65534)
        LIBC.prctl(4, int(is_dumpable), 0, 0, 0)
        os.write(write, guard.ProcessPages().find()[1].encode() or b"it works")
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        found = answer.read()
    os.waitpid(child, 0)
    assert found == ("it works" if is_dumpable else "the kernel does not report written pages: Permission denied")
