"""Whatever happens to a journal's writer or its file, what is read again is what was written, up to some record."""

from __future__ import annotations

import asyncio
import os
import resource
import stat
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlsys_core.errors import InvalidInputError
from mlsys_serving.journal import Journal, JournalUnavailableError, LogFile
from mlsys_serving.journal.records import MAGIC, record, records

Payloads = st.lists(st.binary(max_size=40), max_size=12)


class Killed(BaseException):
    """The writer is dead from here on."""


class KilledAt:
    """Raises :class:`Killed` at the ``number``-th step."""

    def __init__(self, number: int) -> None:
        self.left = number

    def __call__(self, step: str) -> None:
        self.left -= 1
        if self.left == 0:
            raise Killed


@given(Payloads, st.data())
def test_a_damaged_log_gives_what_stands_before_the_damage(payloads: list[bytes], data: st.DataObject) -> None:
    log = bytearray(MAGIC + b"".join(map(record, payloads)))
    ends = [len(MAGIC)]
    for payload in payloads:
        ends.append(ends[-1] + len(record(payload)))
    at = data.draw(st.integers(0, len(log) - 1))
    if data.draw(st.booleans()):
        del log[at:]
    else:
        log[at] ^= data.draw(st.integers(1, 255))
    num_whole = max(sum(end <= at for end in ends) - 1, 0) if at >= len(MAGIC) else 0
    assert [payload for payload, _ in records(log)] == payloads[:num_whole]


def last_three(payloads: list[bytes]) -> list[bytes]:
    """Return the state that records make up: the last three payloads; a snapshot begins anew."""
    begin = max((index + 1 for index, payload in enumerate(payloads) if payload == b"snapshot"), default=0)
    return payloads[begin:][-3:]


@given(st.lists(st.lists(st.binary(max_size=60), min_size=1, max_size=3), max_size=12), st.integers(1, 60))
def test_a_writer_killed_at_any_step_loses_nothing_it_had_told(batches: list[list[bytes]], number: int) -> None:
    told: list[bytes] = []
    in_flight: list[bytes] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with (
            suppress(Killed),
            Journal(
                folder,
                lambda: [b"snapshot", *last_three(told)],
                sync="never",
                least_nbytes=100,
                reach=KilledAt(number),
            ) as journal,
        ):
            for batch in batches:
                in_flight = [b"+" + payload for payload in batch]
                journal.append(in_flight)
                told, in_flight = told + in_flight, []
        with Journal(folder, list) as journal:
            found = last_three(journal.payloads)
    assert found in [last_three(told + in_flight[:count]) for count in range(len(in_flight) + 1)]


def test_a_log_begun_before_its_first_record_is_empty(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_bytes(MAGIC[:4])
    with LogFile(path) as log:
        assert log.payloads == []
        log.append([b"one"])
    assert LogFile(path).payloads == [b"one"]


def test_what_is_no_log_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_bytes(b"a shopping list")
    with pytest.raises(InvalidInputError, match="no journal of this version"):
        LogFile(path)
    assert path.read_bytes() == b"a shopping list"


def test_two_writers_are_refused(tmp_path: Path) -> None:
    with Journal(tmp_path, list), pytest.raises(InvalidInputError, match="another server"):
        Journal(tmp_path, list)
    Journal(tmp_path, list).close()


def test_nobody_else_reads_it(tmp_path: Path) -> None:
    folder = tmp_path / "journal"
    with Journal(folder, list) as journal:
        journal.append([b"a secret"])
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidInputError, match="cannot be made"):
        Journal(tmp_path / "file" / "journal", list)


def test_a_full_journal_refuses_and_keeps_what_it_has(tmp_path: Path) -> None:
    state = [b"x" * 1000]
    with Journal(tmp_path, lambda: state, max_nbytes=3000) as journal:
        journal.append(state)
        state.append(b"y" * 1000)
        journal.append(state[1:])
        with pytest.raises(JournalUnavailableError, match="3000 is its bound"):
            journal.append([b"z" * 1000])
        del state[0]  # a request has ended
        journal.append([b"z" * 1000])
    assert Journal(tmp_path, list).payloads == [b"y" * 1000, b"z" * 1000]


_FULL_DISK = """
import resource, sys
from pathlib import Path
from mlsys_serving.journal import Journal, JournalUnavailableError
journal = Journal(Path(sys.argv[1]), list)
journal.append([b"before"])
resource.setrlimit(resource.RLIMIT_FSIZE, (5000, resource.RLIM_INFINITY))
try:
    journal.append([b"x" * 9000])
except JournalUnavailableError as error:
    print(error)
journal.append([b"small"])
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
journal.append([b"x" * 9000])
"""


def test_a_full_disk_refuses_new_records_and_loses_none(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _FULL_DISK, str(tmp_path)], capture_output=True, text=True, check=True, timeout=60
    )
    assert "cannot be written" in done.stdout
    assert Journal(tmp_path, list).payloads == [b"before", b"small", b"x" * 9000]
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY


def test_a_snapshot_takes_the_place_of_a_long_log(tmp_path: Path) -> None:
    with Journal(tmp_path, lambda: [b"all of it"]) as journal:
        for _ in range(400):
            journal.append([b"x" * 10_000])
        assert journal.nbytes < 3 << 20
    assert Journal(tmp_path, list).payloads[0] == b"all of it"


def test_an_old_half_written_snapshot_does_not_matter(tmp_path: Path) -> None:
    (tmp_path / "journal.new").write_bytes(b"half")
    with Journal(tmp_path, list, max_nbytes=100) as journal:
        journal.append([b"x" * 60])
        journal.append([b"y" * 60])
    assert Journal(tmp_path, list).payloads == [b"y" * 60]


def test_always_means_that_the_disk_has_it(tmp_path: Path) -> None:
    steps: list[str] = []

    async def write(journal: Journal, payload: bytes) -> None:
        journal.append([payload])
        begun = len(steps)
        await journal.kept()
        assert "synced" in steps[begun:]

    async def run() -> None:
        with Journal(tmp_path, list, sync="always", reach=steps.append) as journal:
            await asyncio.gather(*(write(journal, bytes([number])) for number in range(20)))

    asyncio.run(run())
    assert steps.count("synced") < 10  # those who wait at the same time share one
    assert sorted(Journal(tmp_path, list).payloads) == [bytes([number]) for number in range(20)]


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_an_unwritable_folder_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(InvalidInputError, match="cannot be written"):
        Journal(tmp_path, list)
