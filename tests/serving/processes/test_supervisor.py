"""The supervisor with real processes: it replaces who dies, passes signals on, gives up, and leaves nobody behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap

import psutil
import pytest
from mlsys_serving.processes import can_supervise

from tests.processes import FAULT_S, await_ends

pytestmark = pytest.mark.skipif(can_supervise() is not None, reason=str(can_supervise()))

SCRIPT = """
import json, os, signal, socket, sys, time
from mlsys_serving.processes import Boxes, RestartBudget, Supervisor

def worker(number, end):
    while data := end.recv(100):
        if data == b"die":
            os._exit(9)
        if data == b"segv":
            os.kill(os.getpid(), signal.SIGSEGV)
        end.send(str(number).encode())

def messages(link):
    while True:
        yield from link.receive()
        time.sleep(0.002)

def front(link):
    ends, seen = {}, messages(link)
    def until(event, number=None):
        for message, fd in seen:
            if message["event"] == "worker":
                ends[message["number"]] = socket.socket(fileno=fd)
            if message["event"] == event and number in (None, message["number"]):
                return message
    def say(*words):
        print(*words, flush=True)
    def ask(number, data):
        ends[number].send(data)
        return ends[number].recv(100)
    return life(link, until, ask, say)

LIFE

sys.exit(Supervisor(front, worker, num_workers=1, boxes=Boxes(8), budget=RestartBudget(BUDGET)).run())
"""


def supervised(life: str, budget: str = "") -> list[str]:
    """Return the command of a server whose front lives ``life``."""
    script = SCRIPT.replace("LIFE", textwrap.dedent(life)).replace("BUDGET", budget)
    return [sys.executable, "-c", script]


def test_a_worker_that_dies_is_replaced_and_its_death_told():
    life = """
    def life(link, until, ask, say):
        until("worker", 1)
        say(ask(0, b"hello"), ask(1, b"hello"))
        say(ask(0, b"die"))
        death = until("died", 0)
        say(death["exit_code"], death["signal"])
        until("worker", 2)
        say(ask(1, b"segv"))
        death = until("died", 1)
        say(death["exit_code"], death["signal"])
        until("worker", 3)
        say(ask(2, b"hello"), ask(3, b"hello"))
        link.kill(2)
        say(until("died", 2)["signal"])
        return 7
    """
    ran = subprocess.run(supervised(life), capture_output=True, text=True, check=False)
    assert ran.returncode == 7, ran.stderr
    assert ran.stdout.split("\n") == ["b'0' b'1'", "b''", "9 None", "b''", "None 11", "b'2' b'3'", "9", ""]


def test_it_gives_up_and_says_so_by_its_exit_code():
    life = """
    def life(link, until, ask, say):
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        for number in range(100):
            until("worker", number)
            ask(number, b"die")
    """
    ran = subprocess.run(supervised(life, "max_deaths=4, window_s=3600.0"), capture_output=True, text=True, check=False)
    assert ran.returncode == 71
    assert "4 processes have died within 3600 s: the server gives up" in ran.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_reaches_the_front_once_and_ends_all(number: int):
    life = """
    def life(link, until, ask, say):
        count = []
        signal.signal(signal.SIGTERM, lambda *_: count.append(1))
        signal.signal(signal.SIGINT, lambda *_: count.append(1))
        until("worker", 1)
        say("up")
        while not count:
            time.sleep(0.005)
        time.sleep(0.2)
        return 40 + len(count)
    """
    process = subprocess.Popen(supervised(life), stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) == 3
    process.send_signal(number)
    assert process.wait() == 41
    process.stdout.close()
    assert not await_ends(children, timeout_s=FAULT_S)


def test_nobody_outlives_a_supervisor_that_is_killed():
    life = """
    def life(link, until, ask, say):
        until("worker", 1)
        say("up")
        signal.pause()
    """
    process = subprocess.Popen(supervised(life), stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    children = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait()
    process.stdout.close()
    await_ends(children)


def test_a_front_that_is_killed_is_started_anew_with_new_workers():
    life = """
    def life(link, until, ask, say):
        until("worker")
        first = until("worker")["number"]
        say("up", first)
        if first > 1:
            return 5
        signal.pause()
    """
    process = subprocess.Popen(supervised(life), stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "up 1\n"
    (front,) = [child for child in psutil.Process(process.pid).children() if child.name() == "mlsys-front"]
    os.kill(front.pid, signal.SIGKILL)
    said, number = process.stdout.readline().split()
    assert said == "up"
    assert int(number) >= 3  # workers may be replaced before its end shows
    assert process.wait() == 5
    process.stdout.close()


def test_a_process_with_threads_does_not_fork():
    script = """
        import threading, time
        from mlsys_serving.processes import Child
        threading.Thread(target=time.sleep, args=(3600,), name="sleeper", daemon=True).start()
        Child("x", lambda: 0)
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=FAULT_S, check=False)
    assert "only a process with a single thread may fork" in ran.stderr
    assert "sleeper" in ran.stderr


def test_a_signal_that_comes_while_the_front_is_forked_ends_it():
    life = """
    import mlsys_serving.processes.supervisor as module
    fork = module.Child

    def forked(name, live):
        child = fork(name, live)
        if name == "mlsys-front":
            os.kill(os.getpid(), signal.SIGTERM)  # is followed here, before the supervisor knows of the front
        return child

    module.Child = forked
    def life(link, until, ask, say):
        signal.pause()
    """
    done = subprocess.run(supervised(life), timeout=FAULT_S, check=False)
    assert done.returncode == 128 + signal.SIGTERM
