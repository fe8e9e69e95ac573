"""The bodies of all requests together have a bound: they wait for room in order, unread, and not too many wait."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from fastapi import Request
from mlsys_serving.http import HttpConfig, HttpError, Router, runtime_of
from mlsys_serving.http.bodies import MAX_WAITING_BODIES, BodyBudget
from mlsys_serving.http.streaming import LARGE, RequestThreads


def test_large_bodies_wait_for_their_turn_in_order_and_small_ones_do_not() -> None:
    async def main() -> None:
        budget = BodyBudget(10 * LARGE)
        order: list[str] = []
        leave = {name: asyncio.Event() for name in "abc"}

        async def request(name: str, nbytes: int) -> None:
            async with budget.admitted(nbytes):
                order.append(name)
                await leave[name].wait()

        a, b = asyncio.create_task(request("a", 8 * LARGE)), asyncio.create_task(request("b", 99 * LARGE))
        c = asyncio.create_task(request("c", LARGE))
        await asyncio.sleep(0)
        assert order == ["a"]  # b waits for all of it, and c behind b
        async with budget.admitted(LARGE - 1):
            order.append("small")
        leave["a"].set()
        await a
        await asyncio.sleep(0)
        assert order == ["a", "small", "b"]
        b.cancel()
        await asyncio.gather(b, return_exceptions=True)
        await asyncio.sleep(0)
        assert order == ["a", "small", "b", "c"]
        leave["c"].set()
        await c
        assert budget.held_nbytes == 0

    asyncio.run(main())


def test_only_so_many_wait_and_one_that_gives_up_leaves_its_place() -> None:
    async def main() -> None:
        budget = BodyBudget(LARGE)
        done = asyncio.Event()

        async def request() -> None:
            async with budget.admitted(LARGE):
                await done.wait()

        tasks = [asyncio.create_task(request()) for _ in range(MAX_WAITING_BODIES + 1)]
        await asyncio.sleep(0)
        with pytest.raises(HttpError, match="wait: try again") as caught:
            await request()
        assert (caught.value.http_status, caught.value.http_headers["Retry-After"]) == (503, "1")
        tasks[-1].cancel()
        await asyncio.gather(tasks[-1], return_exceptions=True)
        last = asyncio.create_task(request())
        await asyncio.sleep(0)
        assert not last.done()
        done.set()
        await asyncio.gather(*tasks[:-1], last)
        async with budget.admitted(LARGE):  # all of it has come back
            pass

    asyncio.run(main())


def test_memory_is_given_back_when_a_megabyte_of_large_bodies_has_left_and_none_is_there() -> None:
    async def main() -> list[int]:
        seen: list[int] = []
        budget = BodyBudget(1 << 23, on_idle=lambda: seen.append(budget.held_nbytes))
        async with budget.admitted(1 << 20):
            async with budget.admitted(1 << 21):
                pass
            async with budget.admitted(LARGE):
                pass
        await asyncio.sleep(0)
        assert seen == [0]
        for _ in range(2 * (1 << 20) // LARGE + 1):
            async with budget.admitted(LARGE):
                pass
        await asyncio.sleep(0)
        return seen

    assert asyncio.run(main()) == [0, 0, 0]


@pytest.mark.parametrize("chunked", [False, True])
def test_of_two_large_bodies_one_is_read_at_a_time(make_app: Any, serve: Any, chunked: bool) -> None:
    router, running, most = Router(), [0], [0]
    go_on = threading.Event()

    @router.post("/count")
    async def count(request: Request) -> int:
        running[0] += 1
        most[0] = max(most[0], running[0])
        nbytes = len(await request.body())
        await asyncio.to_thread(go_on.wait)
        running[0] -= 1
        return nbytes

    @router.get("/small")
    async def small() -> int:
        return runtime_of(app).bodies.held_nbytes

    app = make_app(router, max_body_nbytes=4 * LARGE, max_bodies_nbytes=5 * LARGE)
    server, part = serve(app), b"x" * LARGE

    def send() -> int:
        answer: int = httpx.post(
            f"{server.url}/count", content=(part for _ in range(3)) if chunked else 3 * part
        ).json()
        return answer

    with ThreadPoolExecutor(2) as clients:
        sent = [clients.submit(send) for _ in range(2)]
        while httpx.get(f"{server.url}/small").json() == 0:
            pass
        assert httpx.get(f"{server.url}/small").json() == (4 if chunked else 3) * LARGE  # unknown: the most it may be
        go_on.set()
        assert [each.result() for each in sent] == [3 * LARGE, 3 * LARGE]
    assert most == [1]
    assert httpx.get(f"{server.url}/small").json() == 0


def test_by_default_four_of_the_largest_bodies_fit() -> None:
    assert HttpConfig(max_body_nbytes=10).bodies_nbytes == 40
    assert HttpConfig(max_body_nbytes=10, max_bodies_nbytes=7).bodies_nbytes == 7


def test_large_work_runs_in_a_thread_and_small_work_where_the_front_wants_it() -> None:
    def name() -> str:
        return threading.current_thread().name

    async def main() -> list[str]:
        without, front = RequestThreads("a"), RequestThreads("b", num_small=1)
        found = [await threads.run(name, size=size) for threads in (without, front) for size in (0, LARGE)]
        for threads in (without, front):
            threads.close()
            threads.trim()  # closed: nothing to do
        return found

    assert asyncio.run(main()) == ["MainThread", "a-large_0", "b_0", "b-large_0"]


def test_the_json_of_large_bodies_is_not_parsed_on_the_event_loops_thread(
    make_app: Any, serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlsys_serving.http import runtime as http_runtime

    router, parse, threads = Router(), http_runtime.parse_json, []

    def watched(body: bytes) -> Any:
        threads.append(threading.current_thread().name)
        return parse(body)

    monkeypatch.setattr(http_runtime, "parse_json", watched)

    @router.post("/length")
    async def length(body: dict[str, Any]) -> int:
        return len(body["text"])

    server = serve(make_app(router))
    for num_chars in (10, LARGE):
        assert httpx.post(f"{server.url}/length", json={"text": "x" * num_chars}).json() == num_chars
    assert threads == ["mlsys-http", "mlsys-front-large_0"]
