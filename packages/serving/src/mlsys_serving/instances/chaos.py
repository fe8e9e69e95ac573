"""Trouble the processes of a server while it answers, and compare what its clients get with an undisturbed run.

The mechanism is one; each system brings :class:`Clients`: requests, and a comparison of answers.
"""

from __future__ import annotations

import asyncio
import math
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import httpx
import psutil
from mlsys_core.errors import InvalidInputError, ServingError

_START_S = 600.0
_LOOK_S = 0.05  # between two looks at what it says
_PATIENCE_S = 120.0  # for an answer
_TOLERANCE = 1e-4  # of numbers: a batch of other requests may round otherwise
_NUM_BODIES = 24
_UNSEEN = {"worker", "rank"}  # hold no connection of a client
TROUBLES = {"kill": "SIGKILL", "stop": "SIGSTOP", "abort": "SIGABRT"}  # names: not every system has the signals
Verdict = Literal["equal", "different", "lost", "twice", "cut"]


@dataclass(slots=True)
class ChaosTally:
    """Results of a run."""

    num_answers: int = 0
    num_equal: int = 0
    num_different: int = 0
    num_lost: int = 0  # refused, or an error, or no whole answer
    num_twice: int = 0  # answers that the server counts beyond those that clients got, or that repeat a part
    num_repeated: int = 0  # runs of requests whose worker had died
    num_cut: int = 0  # answers that broke off with the front that sent them; equal as far as they came
    troubled: dict[str, int] = field(default_factory=dict)  # processes by kind
    longest_s: float = 0.0  # of an answer
    undisturbed_s: float = 0.0  # longest of an answer before the first death, one request at a time
    num_left: int = 0  # processes, after the server's end
    more: dict[str, str] = field(default_factory=dict)  # the system's own figures, by name

    def count(self, verdict: Verdict) -> None:
        """Count an answer."""
        name = f"num_{verdict}"
        setattr(self, name, getattr(self, name) + 1)

    @property
    def num_wrong(self) -> int:
        """Answers that are not those of the undisturbed run, and processes left behind."""
        return self.num_different + self.num_lost + self.num_twice + self.num_left

    def rows(self) -> list[tuple[str, str]]:
        """Return names and values, for a table."""
        return [
            ("answers", str(self.num_answers)),
            *((f"{kind}s troubled", str(number)) for kind, number in sorted(self.troubled.items())),
            ("equal to the undisturbed run", str(self.num_equal)),
            ("different", str(self.num_different)),
            ("lost", str(self.num_lost)),
            ("cut with their front", str(self.num_cut)),
            ("run again", str(self.num_repeated)),
            ("answered twice", str(self.num_twice)),
            ("longest answer", f"{self.longest_s * 1e3:.0f} ms ({self.undisturbed_s * 1e3:.0f} ms undisturbed)"),
            ("processes left", str(self.num_left)),
            *self.more.items(),
        ]


class Clients(Protocol):
    """Requests of one system, how they are asked, and how their answers compare."""

    @property
    def num_at_once(self) -> int:
        """Requests at a time in the undisturbed run."""
        ...

    async def prepare(self, http: httpx.AsyncClient) -> int:
        """Make the requests; return how many there are."""
        ...

    async def ask(self, http: httpx.AsyncClient, number: int, *, is_troubled: bool) -> Any:
        """Return the answer to a request; None: it is refused, an error, or cut short."""
        ...

    def verdict(self, expected: Any, found: Any) -> Verdict:
        """Compare an answer with that of the undisturbed run; "cut": it has only a beginning of it."""
        ...

    async def finish(self, http: httpx.AsyncClient, tally: ChaosTally) -> None:
        """Add the server's own counts to the tally."""
        ...


def bodies(metadata: Mapping[str, Any], seed: int, num: int = _NUM_BODIES) -> list[dict[str, Any]]:
    """Return requests of the Open Inference Protocol for a model with inputs of any length.

    Args:
        metadata: Of the model, as ``GET /v2/models/NAME`` gives it.
        seed: Same seed, same requests.
        num: How many.

    Raises:
        InvalidInputError: The model has inputs for which there is no random value.
    """
    rng = random.Random(seed)
    inputs = metadata["inputs"]
    texts = [each for each in inputs if each["name"] == "text"]
    return [{"inputs": [_tensor(each, rng) for each in texts or inputs]} for _ in range(num)]


def _tensor(spec: Mapping[str, Any], rng: random.Random) -> dict[str, Any]:
    is_batch_only = len(spec["shape"]) > 1
    shape = [
        size if size >= 0 else (1 if index == 0 and is_batch_only else rng.randint(2, 24))
        for index, size in enumerate(spec["shape"])
    ]
    count = math.prod(shape)
    values: list[Any]
    match spec["datatype"]:
        case "BYTES":
            letters = "abcdefghijklmnopqrstuvwxyz"
            values = ["".join(rng.choices(letters, k=rng.randint(2, 12))) for _ in range(count)]
        case "FP32" | "FP64":
            values = [rng.uniform(-1, 1) for _ in range(count)]
        case "INT64" | "INT32":
            values = [rng.randint(1, 8) for _ in range(count)]
        case other:
            raise InvalidInputError(f"input {spec['name']!r} is {other}: no random values are known for it")
    return {"name": spec["name"], "datatype": spec["datatype"], "shape": shape, "data": values}


def is_near(found: Any, expected: Any) -> bool:
    """Return whether two JSON values are the same, numbers within a tolerance.

    Example:
        >>> is_near({"y": [1.0, "a"]}, {"y": [1.00001, "a"]}), is_near([1], [1, 2])
        (True, False)
    """
    if isinstance(expected, dict):
        return (
            isinstance(found, dict)
            and found.keys() == expected.keys()
            and all(is_near(found[name], expected[name]) for name in expected)
        )
    if isinstance(expected, list):
        return isinstance(found, list) and len(found) == len(expected) and all(map(is_near, found, expected))
    if isinstance(expected, float):
        is_number = isinstance(found, int | float)
        return is_number and math.isclose(found, expected, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)
    return bool(found == expected)


class ChaosServer:
    """A command of ``mlsys`` that serves on a free port; a context ends it.

    Args:
        arguments: Of the command.
    """

    def __init__(self, arguments: Sequence[str]) -> None:
        self._arguments = arguments
        self.url = ""

    def __enter__(self) -> ChaosServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._popen.terminate()
        try:
            self._popen.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()

    def start(self) -> None:
        """Start it, or start it again on the same port, and wait until it serves.

        Raises:
            ServingError: It ended before it served; the message is the server's own.
        """
        port = self.url.rpartition(":")[2] or "0"
        command = [sys.executable, "-m", "mlsys_core", *self._arguments, "--port", port, "--log-level", "error"]
        with tempfile.NamedTemporaryFile() as words:  # a pipe would be full some day
            self._popen = subprocess.Popen(command, stdout=words, stderr=subprocess.STDOUT)
            self.process = psutil.Process(self._popen.pid)
            deadline, is_running, said = time.monotonic() + _START_S, True, ""
            while is_running and time.monotonic() < deadline:
                is_running = self._popen.poll() is None
                said = Path(words.name).read_text()
                if (found := re.search(r"http://[0-9.]+:\d+(?=\D)", said)) is not None:
                    self.url = found[0]
                    return
                time.sleep(_LOOK_S)
        self.__exit__()
        why = said.rpartition("mlsys: error: ")[2].strip()
        raise ServingError(f"the server did not start: {why or 'it said nothing'}")

    def trouble(self, kind: str, process: psutil.Process, number: int) -> None:
        """Send a signal to a process of it; a supervisor is started again when all that it had have ended."""
        children = self.process.children(recursive=True)
        with suppress(psutil.NoSuchProcess):  # it has ended meanwhile
            process.send_signal(number)
        if kind == "supervisor":
            self._popen.wait()
            _, alive = psutil.wait_procs(children, timeout=10)
            if alive:
                raise ServingError(f"{len(alive)} processes outlived their supervisor")
            self.start()


def counted(metrics: str, name: str, model: str) -> int:
    r"""Return a number of a model in Prometheus' text, summed over its versions.

    Example:
        >>> counted('runs{model="a",version="1"} 2.0\nruns{model="a",version="2"} 1.0', "runs", "a")
        3
    """
    found = re.findall(rf'^{re.escape(name)}{{model="{re.escape(model)}"[^}}]*}} (\S+)$', metrics, re.MULTILINE)
    return round(sum(map(float, found)))


def processes_of(server: psutil.Process, kinds: Sequence[str]) -> list[tuple[str, psutil.Process]]:
    """Return the processes of some kinds of a server, each with its kind; waiting workers are among them.

    Ranks that are not its children, but Ray's, have its number in their titles.
    """
    found = [(child.name().removeprefix("mlsys-"), child) for child in server.children(recursive=True)]
    if "rank" in kinds:
        title, everyone = f"mlsys-rank of orca-{server.pid}-", psutil.process_iter(["cmdline"])
        found += [("rank", each) for each in everyone if title in "".join(each.info["cmdline"] or ())]
    return [each for each in [*found, ("supervisor", server)] if each[0] in kinds]


def workers_of(server: psutil.Process) -> list[psutil.Process]:
    """Return the workers of a server, the waiting one among them."""
    return [process for _, process in processes_of(server, ["worker"])]


class ModelClients:
    """Clients of one model behind the Open Inference Protocol.

    Args:
        model: Name of the model on the wire.
        seed: Of the requests.
    """

    num_at_once = 1

    def __init__(self, model: str, seed: int) -> None:
        self._model, self._seed = model, seed
        self._bodies: list[dict[str, Any]] = []

    async def prepare(self, http: httpx.AsyncClient) -> int:
        """Make requests for the inputs that the model's metadata names."""
        metadata = (await http.get(f"/v2/models/{self._model}")).raise_for_status().json()
        self._bodies = bodies(metadata, self._seed)
        return len(self._bodies)

    async def ask(self, http: httpx.AsyncClient, number: int, *, is_troubled: bool) -> Any:
        """Return the body of an answer with status 200."""
        response = await http.post(f"/v2/models/{self._model}/infer", json=self._bodies[number])
        return response.json() if response.status_code == 200 else None

    def verdict(self, expected: Any, found: Any) -> Verdict:
        """Compare numbers within a tolerance."""
        return "equal" if is_near(found, expected) else "different"

    async def finish(self, http: httpx.AsyncClient, tally: ChaosTally) -> None:
        """Count requests that ran twice, and answers that nobody got."""
        statistics = (await http.get(f"/v2/models/{self._model}/stats")).raise_for_status().json()["model_stats"]
        num_told = sum(each["inference_stats"]["success"]["count"] for each in statistics)
        tally.num_twice = max(0, num_told - len(self._bodies) - tally.num_equal - tally.num_different)
        tally.num_repeated = counted((await http.get("/metrics")).text, "mlsys_inference_repeated", self._model)


async def _drive(
    server: ChaosServer,
    clients: Clients,
    *,
    kinds: Sequence[str],
    seconds: float,
    every_s: float,
    streams: int,
    seed: int,
    trouble: str,
) -> ChaosTally:
    tally, rng = ChaosTally(), random.Random(seed)
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.url, timeout=_PATIENCE_S, limits=limits) as http:
        num = await clients.prepare(http)
        room = asyncio.Semaphore(clients.num_at_once)

        async def first(number: int) -> Any:
            async with room:
                started_s = time.monotonic()
                answer = await clients.ask(http, number, is_troubled=False)
                tally.undisturbed_s = max(tally.undisturbed_s, time.monotonic() - started_s)
            if answer is None:
                raise ServingError(f"answers fail without trouble: the server refuses request {number}, or cuts it")
            return answer

        expected = await asyncio.gather(*map(first, range(num)))
        until = time.monotonic() + seconds

        cuts = [0]  # beginnings and ends of troubles of who holds connections: odd while one is under way

        async def ask() -> None:
            while time.monotonic() < until:
                number, started_s, num_cuts = rng.randrange(num), time.monotonic(), cuts[0]
                tally.num_answers += 1
                try:
                    found = await clients.ask(http, number, is_troubled=True)
                except httpx.HTTPError:
                    found = None
                tally.longest_s = max(tally.longest_s, time.monotonic() - started_s)
                verdict = "lost" if found is None else clients.verdict(expected[number], found)
                may_be_cut = num_cuts % 2 or cuts[0] != num_cuts
                tally.count("lost" if verdict == "cut" and not may_be_cut else verdict)

        async def make_trouble() -> None:
            while time.monotonic() + every_s < until:
                await asyncio.sleep(every_s)
                processes = processes_of(server.process, kinds)
                if processes:  # of the kind that had the fewest troubles
                    kind = min((each for each, _ in processes), key=lambda each: tally.troubled.get(each, 0))
                    process = rng.choice([each for of, each in processes if of == kind])
                    tally.troubled[kind] = tally.troubled.get(kind, 0) + 1
                    cuts[0] += kind not in _UNSEEN
                    await asyncio.to_thread(server.trouble, kind, process, getattr(signal, TROUBLES[trouble]))
                    cuts[0] += kind not in _UNSEEN

        await asyncio.gather(make_trouble(), *(ask() for _ in range(streams)))
        await clients.finish(http, tally)
    return tally


def run_chaos(
    arguments: Sequence[str],
    clients: Clients,
    *,
    seconds: float,
    every_s: float,
    streams: int,
    seed: int = 0,
    trouble: str = "kill",
    kinds: Sequence[str] = ("worker",),
) -> ChaosTally:
    """Serve a model, trouble a process again and again while it answers, and return what came of it.

    Args:
        arguments: Of ``mlsys``, such as ``["dvabatch", "serve", "all-minilm-l6-v2", "--instances", "2"]``.
        clients: The system's requests, and the comparison of its answers.
        seconds: Time during which workers are troubled.
        every_s: Seconds between two troubles.
        streams: Requests at a time.
        seed: Of the order of requests, and of who is troubled.
        trouble: A name of :data:`TROUBLES`.
        kinds: Kinds of processes that are troubled: "worker" (or a standby), "rank", "front", "supervisor".

    Raises:
        ServingError: The server did not start, outlived its supervisor, or refuses a request without trouble.
    """
    options: dict[str, Any] = {"seconds": seconds, "every_s": every_s, "streams": streams}
    with ChaosServer(arguments) as server:
        tally = asyncio.run(_drive(server, clients, kinds=kinds, **options, seed=seed, trouble=trouble))
        processes = server.process.children(recursive=True)
    _, alive = psutil.wait_procs(processes, timeout=5)
    tally.num_left = len(alive)
    return tally
