"""Whatever happens to a log's writer or its file, what is read again is what was written, each transaction whole."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sqlite3
import stat
import subprocess
import sys
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlsys_core.errors import InvalidInputError
from mlsys_orca_gateway.log import Log, LogUnavailableError, Statement, make_folder

SCHEMA = "CREATE TABLE parts(write_id INTEGER, part INTEGER, value BLOB)"


def insert(write_id: int, parts: int = 1, value: bytes = b"x") -> list[Statement]:
    return [("INSERT INTO parts VALUES (?, ?, ?)", (write_id, part, value)) for part in range(parts)]


def whole(path: Path) -> dict[int, int]:
    """Return the number of parts of each write that is in the log."""
    with Log(path, SCHEMA) as log:
        return dict(log.rows("SELECT write_id, count(*) FROM parts GROUP BY write_id"))


_WRITER = f"""
import sys
from pathlib import Path
from mlsys_orca_gateway.log import Log
sync, step, number = sys.argv[2], sys.argv[3], int(sys.argv[4])
left = number
def reach(reached):
    global left
    left -= reached == step
    if left == 0:
        import os, signal
        os.kill(os.getpid(), signal.SIGKILL)
with Log(Path(sys.argv[1]), {SCHEMA!r}, sync=sync, reach=reach) as log:
    for write_id in range(int(sys.argv[5]), int(sys.argv[5]) + 400):
        insert, parts = "INSERT INTO parts VALUES (?, ?, ?)", range(write_id % 5 + 1)
        rows = [(insert, (write_id, part, b"x" * 700)) for part in parts]
        log.note(*((sql, (-1 - row[0], *row[1:])) for sql, row in rows))
        log.write(*rows, durable=write_id % 7 == 0).result()
        print(write_id, flush=True)
"""


def killed_writer(path: Path, *, sync: str, step: str, number: int, first: int, kill_after: int | None) -> list[int]:
    """Run a writer that is killed at a step, or when it has acknowledged so many writes; return those."""
    command = [sys.executable, "-c", _WRITER, str(path), sync, step, str(number), str(first)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        told = []
        for line in process.stdout:
            told.append(int(line))
            if len(told) == kill_after:
                process.send_signal(signal.SIGKILL)
        return told


@pytest.mark.parametrize("sync", ["always", "interval", "never"])
def test_a_writer_killed_at_random_loses_nothing_that_it_had_acknowledged(tmp_path: Path, sync: str) -> None:
    """Nor is any write there in part, acknowledged or not, whoever waited for it; again and again on one file."""
    drawn, told = random.Random(sync), set[int]()
    for life in range(6):
        step = drawn.choice(["half appended", "appended", "synced", "none"])
        kill_after = drawn.randint(1, 200) if step == "none" else None
        given_ids = killed_writer(
            tmp_path / "log",
            sync=sync,
            step=step,
            number=drawn.randint(1, 60),
            first=1000 * life,
            kill_after=kill_after,
        )
        told |= set(given_ids)
        found = whole(tmp_path / "log")
        assert {write_id: found.get(write_id) for write_id in told} == {each: each % 5 + 1 for each in told}
        assert all(count == (each if each >= 0 else -1 - each) % 5 + 1 for each, count in found.items())


@given(st.data())
def test_a_damaged_end_gives_what_stands_before_the_damage(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("log") / "log"
    log = Log(path, SCHEMA, sync="never")
    for write_id in range(8):
        log.write(*insert(write_id, 3, b"x" * 1500)).result()
    (path.parent / "copy").write_bytes(path.read_bytes())  # as if the writer had died here
    wal = bytearray((path.parent / "log-wal").read_bytes())
    log.close()
    at = data.draw(st.integers(32, len(wal) - 1))
    if data.draw(st.booleans()):
        del wal[at:]
    else:
        wal[at] ^= data.draw(st.integers(1, 255))
    (path.parent / "copy-wal").write_bytes(wal)
    found = whole(path.parent / "copy")
    assert found == dict.fromkeys(range(len(found)), 3)


@pytest.mark.parametrize("content", [b"a shopping list", b"SQLite format 3\0" + b"\xff" * 5000])
def test_what_is_no_log_is_refused_and_left_as_it_is(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "log"
    path.write_bytes(content)
    with pytest.raises(InvalidInputError, match=r"no journal of this version.*move it away, or give another folder"):
        Log(path, SCHEMA)
    assert path.read_bytes() == content


@pytest.mark.parametrize("change", ["PRAGMA user_version = 2", "PRAGMA application_id = 7"])
def test_another_versions_log_and_another_programs_are_refused(tmp_path: Path, change: str) -> None:
    path = tmp_path / "log"
    Log(path, SCHEMA).close()
    other = sqlite3.connect(path)
    other.execute(change)
    other.close()
    with pytest.raises(InvalidInputError, match="another program or version"):
        Log(path, SCHEMA)


def test_a_damaged_log_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with Log(path, SCHEMA) as log:
        log.write(*insert(1, 200, b"x" * 700)).result()
    content = bytearray(path.read_bytes())
    content[8192:12288] = bytes(4096)
    path.write_bytes(content)
    with pytest.raises(InvalidInputError, match=r"damaged|malformed"):
        Log(path, SCHEMA)


def test_two_writers_are_refused(tmp_path: Path) -> None:
    with Log(tmp_path / "log", SCHEMA), pytest.raises(InvalidInputError, match="another server"):
        Log(tmp_path / "log", SCHEMA, lock_s=0.1)
    Log(tmp_path / "log", SCHEMA).close()


def test_nobody_else_reads_it(tmp_path: Path) -> None:
    folder = tmp_path / "journal"
    make_folder(folder)
    with Log(folder / "log", SCHEMA) as log:
        log.write(*insert(1, 1, b"a secret")).result()
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidInputError, match="cannot be made"):
        make_folder(tmp_path / "file" / "journal")


def test_a_full_log_refuses_and_keeps_what_it_has(tmp_path: Path) -> None:
    with Log(tmp_path / "log", SCHEMA, max_nbytes=50_000) as log:
        for write_id in range(8):
            log.write(*insert(write_id, 1, b"x" * 4000)).result()
        with pytest.raises(LogUnavailableError, match="50000 is its bound"):
            log.write(*insert(8, 1, b"z" * 30_000)).result()
        log.write(("DELETE FROM parts WHERE write_id < 7", ())).result()  # requests have ended
        log.write(*insert(8, 1, b"z" * 30_000)).result()
    assert whole(tmp_path / "log") == {7: 1, 8: 1}


def test_one_that_finds_no_room_does_not_refuse_the_others_of_its_transaction(tmp_path: Path) -> None:
    with Log(tmp_path / "log", SCHEMA, max_nbytes=50_000) as log:
        with log._changed:  # the writer waits: all are one transaction
            writes: list[Future[Any]] = [
                log.write(*insert(each, 1, b"x" * (90_000 * (each == 1)))) for each in range(3)
            ]
        assert [write.exception() is None for write in writes] == [True, False, True]
    assert whole(tmp_path / "log") == {0: 1, 2: 1}


_FULL_DISK = f"""
import resource, sys
from pathlib import Path
from mlsys_orca_gateway.log import Log, LogUnavailableError
log = Log(Path(sys.argv[1]), {SCHEMA!r})
insert = "INSERT INTO parts VALUES (?, ?, ?)"
log.write((insert, (1, 0, b"before"))).result()
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
try:
    log.write((insert, (2, 0, b"x" * 90000))).result()
except LogUnavailableError as error:
    print(error)
log.note((insert, (3, 0, b"noted")))
print(log.rows("SELECT count(*) FROM parts"))
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
log.write((insert, (4, 0, b"x" * 90000))).result()
log.close()
"""


def test_a_full_disk_refuses_new_writes_and_loses_none(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _FULL_DISK, str(tmp_path / "log")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert "cannot be written" in done.stdout
    assert "[(1,)]" in done.stdout
    assert "what clients got is not written down" in done.stderr
    assert whole(tmp_path / "log") == {1: 1, 3: 1, 4: 1}


def test_always_means_that_the_disk_has_it(tmp_path: Path) -> None:
    steps: list[str] = []

    async def write(log: Log, write_id: int) -> None:
        begun = len(steps)
        await log.kept(*insert(write_id))
        assert "synced" in steps[begun:]

    async def run() -> None:
        with Log(tmp_path / "log", SCHEMA, sync="always", reach=steps.append) as log:
            await asyncio.gather(*(write(log, number) for number in range(20)))

    asyncio.run(run())
    assert steps.count("synced") < 10  # those who wait at the same time share one
    assert whole(tmp_path / "log") == dict.fromkeys(range(20), 1)


def test_what_must_be_on_the_disk_is_and_all_else_is_within_a_second(tmp_path: Path) -> None:
    steps: list[str] = []
    with Log(tmp_path / "log", SCHEMA, reach=steps.append) as log:
        log.write(*insert(1)).result()
        log.write(*insert(2), durable=True).result()
        assert steps[-1] == "synced"
        log.write(*insert(3)).result()
        while steps[-1] != "synced":
            pass
    with Log(tmp_path / "other", SCHEMA, sync="never", reach=(others := list[str]()).append) as log:
        log.write(*insert(1), durable=True).result()
    assert "synced" not in others


def test_a_log_that_is_closed_refuses_writes_and_forgets_notes(tmp_path: Path) -> None:
    log = Log(tmp_path / "log", SCHEMA)
    log.note(*insert(1))
    log.close()
    log.note(*insert(2))
    with pytest.raises(LogUnavailableError, match="closed"):
        log.write(*insert(3))
    assert whole(tmp_path / "log") == {1: 1}


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_an_unwritable_folder_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(InvalidInputError, match="cannot be written"):
        make_folder(tmp_path)
