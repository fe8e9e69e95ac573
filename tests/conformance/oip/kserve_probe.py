"""The ``kserve`` client's view of a server, as JSON on its standard output; runs in an environment of its own.

.peers/kserve/bin/python tests/conformance/oip/kserve_probe.py HTTP_HOST:PORT GRPC_HOST:PORT
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import numpy as np


async def probe(http: str, grpc: str) -> dict[str, Any]:
    """Health and inference, by REST with binary and with JSON tensors, and by gRPC; what an unknown model gives."""
    from kserve import (  # type: ignore[import-not-found]
        InferenceGRPCClient,
        InferenceRESTClient,
        InferInput,
        InferRequest,
        RESTConfig,
    )

    def request(model: str, *, binary: bool) -> Any:
        inputs = [InferInput(name, [1, 2], "FP32") for name in "ab"]
        for tensor in inputs:
            tensor.set_data_from_numpy(np.array([[1, 2]], np.float32), binary_data=binary)
        return InferRequest(model, inputs, request_id="7")

    def answer(response: Any) -> Any:
        [output] = response.outputs
        return [response.id, response.model_name, output.name, output.datatype, output.as_numpy().tolist()]

    def text(model: str) -> Any:
        tensor = InferInput("text_input", [1, 1], "BYTES")
        tensor.set_data_from_numpy(np.array([[b"hello"]], np.object_), binary_data=True)
        return InferRequest(model, [tensor])

    found: dict[str, Any] = {}
    rest, url = InferenceRESTClient(RESTConfig(protocol="v2", retries=0)), f"http://{http}"
    found["rest live"] = await rest.is_server_live(url)
    found["rest ready"] = await rest.is_server_ready(url)
    found["rest model ready"] = [await rest.is_model_ready(url, name) for name in ("add", "nope")]
    for binary in (True, False):
        response = await rest.infer(url, request("add", binary=binary), model_name="add")
        found[f"rest infer, {'binary' if binary else 'json'}"] = answer(response)
    response = await rest.infer(url, text("upper"), model_name="upper")
    found["rest text"] = [str(element) for element in response.outputs[0].as_numpy().ravel().tolist()]
    try:
        await rest.infer(url, request("nope", binary=True), model_name="nope")
    except Exception as error:  # noqa: BLE001  (whatever the client makes of it)
        found["rest unknown model"] = [type(error).__name__, getattr(error.response, "status_code", None)]  # type: ignore[attr-defined]
    await rest.close()
    client = InferenceGRPCClient(grpc, retries=2)
    found["grpc live"] = await client.is_server_live()
    found["grpc ready"] = await client.is_server_ready()
    found["grpc model ready"] = [await client.is_model_ready(name) for name in ("add", "nope")]
    found["grpc infer"] = answer(await client.infer(request("add", binary=True)))
    try:
        await client.infer(request("nope", binary=True))
    except Exception as error:  # noqa: BLE001  (as above)
        found["grpc unknown model"] = str(error.code())  # type: ignore[attr-defined]
    await client.close()
    return found


if __name__ == "__main__":
    print(json.dumps(asyncio.run(probe(sys.argv[1], sys.argv[2]))))
