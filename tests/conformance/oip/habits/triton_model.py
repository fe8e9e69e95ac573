"""The models of ``models.py`` in Triton's python backend: each model's ``1/model.py`` is a copy. Runs inside Triton."""

from __future__ import annotations

import json
import time

import numpy as np
import triton_python_backend_utils as backend  # type: ignore[import-not-found]


def tensor(name, array):  # type: ignore[no-untyped-def]
    """Return an output, of an array or of a tensor of another name."""
    if isinstance(array, backend.Tensor):
        return backend.Tensor.from_dlpack(name, array.to_dlpack())
    return backend.Tensor(name, array)


def value(request, name):  # type: ignore[no-untyped-def]
    """Return an input's array; None: it is not given."""
    found = backend.get_input_tensor_by_name(request, name)
    return None if found is None else found.as_numpy()


class TritonPythonModel:
    """The model that the configuration's name calls for."""

    def initialize(self, args):  # type: ignore[no-untyped-def]
        """Note the model's name, version and configuration."""
        self.name, self.version = args["model_name"], int(args["model_version"])
        self.config = json.loads(args["model_config"])
        self.calls, self.sums = 0, {}

    def execute(self, requests):  # type: ignore[no-untyped-def]
        """Answer requests, each on its own."""
        answer = getattr(self, self.name)
        if self.name == "repeat":
            return answer(requests)
        responses = []
        for request in requests:
            try:
                outputs = answer(request)
                responses.append(backend.InferenceResponse([tensor(*each) for each in outputs.items()]))
            except Exception as error:  # noqa: BLE001 - a model's error is the request's answer
                responses.append(backend.InferenceResponse(error=backend.TritonError(str(error))))
        return responses

    def add(self, request):  # type: ignore[no-untyped-def]
        """Add elementwise."""
        a, b = value(request, "a"), value(request, "b")
        return {"sum": a if b is None else a + b}

    def upper(self, request):  # type: ignore[no-untyped-def]
        """Convert texts to capitals."""
        texts = value(request, "text_input")
        found = [text.decode().upper().encode() for text in texts.ravel()]
        return {"text_output": np.array(found, np.object_).reshape(texts.shape)}

    def echo(self, request):  # type: ignore[no-untyped-def]
        """Return each input unchanged; outputs of inputs that are not given are empty."""
        given = {each.name(): each.as_numpy() for each in request.inputs()}
        answer = {}
        for each in self.config["output"]:
            dtype = backend.triton_string_to_numpy(each["data_type"])
            answer[each["name"]] = given.get(each["name"].removesuffix("_out"), np.zeros((0, 0), dtype))
        return answer

    def bfloat(self, request):  # type: ignore[no-untyped-def]
        """Return the input unchanged; numpy has no such numbers."""
        return {"y": backend.get_input_tensor_by_name(request, "x")}

    def broken(self, request):  # type: ignore[no-untyped-def]
        """Fail."""
        raise KeyError("secret")

    def versioned(self, request):  # type: ignore[no-untyped-def]
        """Return the version."""
        return {"version": np.full((1,), self.version, np.int32)}

    def slow(self, request):  # type: ignore[no-untyped-def]
        """Sleep, and return the number of requests so far."""
        time.sleep(float(value(request, "x").ravel()[0]))
        self.calls += 1
        return {"calls": np.full((len(value(request, "x")), 1), self.calls, np.int32)}

    def accumulate(self, request):  # type: ignore[no-untyped-def]
        """Return running sums of a sequence's numbers."""
        key = int(value(request, "CORRID").ravel()[0])
        base = 0 if value(request, "START").ravel()[0] else self.sums.get(key, 0)
        sums = base + np.cumsum(value(request, "frame"), axis=0)
        self.sums[key] = int(sums[-1, 0]) if len(sums) else base
        return {"sum": sums.astype(np.int64)}

    def repeat(self, requests):  # type: ignore[no-untyped-def]
        """Send the text word by word."""
        for request in requests:
            sender, times = request.get_response_sender(), value(request, "times")
            words = value(request, "text")[0].split() * (1 if times is None else int(times[0]))
            for index, word in enumerate(words):
                outputs = {"word": np.array([word], np.object_), "index": np.array([index], np.int32)}
                sender.send(backend.InferenceResponse([tensor(*each) for each in outputs.items()]))
            sender.send(flags=backend.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
