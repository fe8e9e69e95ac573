"""Requests to models that are served over the Open Inference Protocol, for the tests of several distributions."""

from __future__ import annotations

import asyncio
from typing import Any, NoReturn

from mlsys_serving.models import InferRequest
from torch.utils._python_dispatch import TorchDispatchMode


def tensor(name: str, datatype: str, rows: list[list[float]]) -> dict[str, object]:
    """Return an input of a request as JSON."""
    data = [value for row in rows for value in row]
    return {"name": name, "datatype": datatype, "shape": [len(rows), len(rows[0])], "data": data}


class NoOperators(TorchDispatchMode):
    """None of torch's operators may run in this thread."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        raise AssertionError(f"{func} runs in the event loop's thread")


def ask_without_operators(served: Any, inputs: dict[str, Any]) -> None:
    """Ask for three rows; assert that this thread runs none of torch's operators."""

    async def ask() -> None:
        request = InferRequest(
            key="1", model_name=served.spec.name, model_version="1", inputs=inputs, outputs=(), num_rows=3
        )
        with NoOperators():
            response = await served.infer(request)
            await served.close()
        assert {array.shape[0] for array in response.outputs.values()} == {3}

    asyncio.run(ask())
