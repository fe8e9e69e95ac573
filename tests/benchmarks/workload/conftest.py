"""Fixtures: an event loop whose time jumps instead of passing, and a real HTTP server with many bad habits."""

import asyncio
import json
import selectors
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest


class _JumpingSelector(selectors.DefaultSelector):
    """Instead of sleeping until the next timer, moves the loop's clock to it."""

    loop: "_VirtualTimeLoop"

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if not ready:
            if timeout is None:
                raise RuntimeError("deadlock: nothing is ready and nothing is scheduled")
            self.loop.now_s += timeout
        return ready


class _VirtualTimeLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.now_s = 100.0  # not 0: times must be relative to the run's start
        selector = _JumpingSelector()
        selector.loop = self
        super().__init__(selector)

    def time(self) -> float:
        return self.now_s


@pytest.fixture
def run_virtual() -> Iterator[Callable[[Coroutine[Any, Any, Any]], Any]]:
    """Runs a coroutine to its end in virtual time."""
    with asyncio.Runner(loop_factory=_VirtualTimeLoop) as runner:
        yield runner.run


class BadServer:
    """A server of OpenAI-style streams; the requested model's name says how it behaves. ``bodies`` keeps what came."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.client_ports: list[int] = []
        self.num_abandoned = 0  # streams whose client left before the end
        self.num_finished = 0
        # IPPROTO_TCP: only where it sees that does asyncio switch off Nagle's algorithm, worth 40 ms a request.
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self._socket.bind(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/v1"

    def app(self) -> Any:
        import fastapi
        from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse

        app = fastapi.FastAPI()

        def event(payload: Any) -> str:
            return f"data: {json.dumps(payload)}\n\n"

        async def stream(body: dict[str, Any], is_chat: bool) -> Any:
            model, num_tokens = body["model"], body["max_tokens"]

            def chunk(text: str, finish: str | None = None) -> str:
                part = {"delta": {"content": text}} if is_chat else {"text": text}
                return event({"choices": [{"index": 0, **part, "finish_reason": finish}]})

            is_finished = False
            try:
                if is_chat:
                    yield event({"choices": [{"index": 0, "delta": {"role": "assistant"}, "finish_reason": None}]})
                for index in range(num_tokens):
                    if model == "stall":
                        await asyncio.sleep(60)
                    if model == "slow":
                        await asyncio.sleep(0.05)
                    if model == "cut" and index == 2:
                        raise ConnectionAbortedError("the server dies in the middle")
                    if model == "vanish" and index == 2:
                        return  # ends in good order, but is not complete
                    if model == "fail-late" and index == 2:
                        yield event({"error": {"message": "out of blocks", "code": 500}})
                        return
                    if model == "garbage" and index == 2:
                        yield "data: {nonsense\n\n"
                    if model == "list" and index == 2:
                        yield "data: [1, 2]\n\n"
                    yield chunk(f"t{index} ", "length" if index == num_tokens - 1 and model != "vanish" else None)
                yield event({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": num_tokens}})
                if model != "no-done":
                    yield "data: [DONE]\n\n"
                is_finished = True
            finally:
                self.num_abandoned += not is_finished
                self.num_finished += is_finished

        async def answer(request: fastapi.Request, is_chat: bool) -> Any:
            body = await request.json()
            self.bodies.append(body)
            self.headers.append(dict(request.headers))
            self.client_ports.append(request.client.port)
            model = body["model"]
            if model == "error500":
                return PlainTextResponse("CUDA error: out of memory", status_code=500)
            if model == "busy" and len(self.bodies) % 2:
                return JSONResponse({"detail": "queue is full"}, status_code=429)
            if model == "plain" or not body.get("stream"):
                usage = {"prompt_tokens": 7, "completion_tokens": body["max_tokens"]}
                part = {"message": {"content": "hello"}} if is_chat else {"text": "hello"}
                return {"choices": [{"index": 0, **part, "finish_reason": "stop"}], "usage": usage}
            return StreamingResponse(stream(body, is_chat), media_type="text/event-stream")

        @app.post("/v1/completions")
        async def completions(request: fastapi.Request) -> Any:
            return await answer(request, is_chat=False)

        @app.post("/v1/chat/completions")
        async def chat(request: fastapi.Request) -> Any:
            return await answer(request, is_chat=True)

        @app.post("/predict")
        async def predict(request: fastapi.Request) -> Any:
            body = await request.json()
            self.bodies.append(body)
            return {"doubled": 2 * body["length"]}

        return app

    def serve(self) -> Iterator["BadServer"]:
        import uvicorn

        config = uvicorn.Config(
            self.app(), log_level="critical", lifespan="off", timeout_graceful_shutdown=1, access_log=False
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [self._socket]}, daemon=True)
        thread.start()
        ready = threading.Event()
        while not server.started and thread.is_alive():
            ready.wait(0.01)
        assert server.started
        try:
            yield self
        finally:
            server.should_exit = True
            thread.join()
            self._socket.close()


@pytest.fixture(scope="session")
def shared_server() -> Iterator[BadServer]:
    yield from BadServer().serve()


@pytest.fixture
def server(shared_server: BadServer) -> BadServer:
    """The one server of the session, its records emptied."""
    shared_server.bodies.clear()
    shared_server.headers.clear()
    shared_server.client_ports.clear()
    shared_server.num_abandoned = 0
    return shared_server
