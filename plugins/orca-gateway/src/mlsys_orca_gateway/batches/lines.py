"""The lines of a batch's input: their shape, their places, and what each draws by chance. Pure but for reading."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import IO, Any

from mlsys_orca.api.answers import Identity
from mlsys_serving.http import HttpError
from mlsys_serving.http.bodies import parse_json

from mlsys_orca_gateway.batches.records import BatchError

MAX_REQUESTS = 50_000  # of one batch
MAX_ERRORS = 100  # that are told
_MAX_ID_CHARS = 512
_MAX_WEIGHT = 1 << 15
_LINE_ENDS = "\x85\u2028\u2029"


@dataclass(slots=True)
class Plan:
    """Places of a batch's requests in its file."""

    starts: array[int] = field(default_factory=lambda: array("Q"))  # bytes
    stops: array[int] = field(default_factory=lambda: array("Q"))
    weights: array[int] = field(default_factory=lambda: array("H"))  # answers that the request has made
    errors: list[BatchError] = field(default_factory=list)
    model: str | None = None  # of the first request

    def __len__(self) -> int:
        return len(self.starts)


def lines_of(file: IO[bytes] | Iterable[bytes]) -> Iterator[tuple[int, int, bytes]]:
    """Yield number (from 1), first byte and text of each line that is not empty."""
    start = 0
    for number, line in enumerate(file, 1):
        if line.strip():
            yield number, start, line
        start += len(line)


def check_shape(file: IO[bytes] | Iterable[bytes]) -> int:
    """Return the number of requests in a file: a JSON object on each line.

    Raises:
        HttpError: 400, naming the line.

    Example:
        >>> check_shape([b'{"custom_id": "a"}'])
        1
    """
    num = 0
    for number, _, line in lines_of(file):
        try:
            value = parse_json(line)
        except HttpError as error:
            raise _bad_file(f"line {number} is no JSON: {error}".replace("the body is not valid JSON: ", "")) from None
        if not isinstance(value, dict):
            raise _bad_file(f"line {number} is no JSON object: each line of the file is one request")
        num += 1
        if num > MAX_REQUESTS:
            raise _bad_file(f"the file has more than {MAX_REQUESTS} requests, the most of one batch: send several")
    if not num:
        raise _bad_file("the file has no request in it: each of its lines is a JSON object")
    return num


def _bad_file(message: str) -> HttpError:
    return HttpError(message, http_status=400, error_code="invalid_file", param="file")


def plan_of(file: IO[bytes] | Iterable[bytes], endpoint: str) -> Plan:
    """Return the places of all requests for ``endpoint``, and what is wrong with them.

    Example:
        >>> line = b'{"custom_id": "a", "method": "GET", "url": "/v1/completions", "body": {}}'
        >>> [(error.code, error.line) for error in plan_of([line], "/v1/completions").errors]
        [('invalid_method', 1)]
    """
    plan, seen = Plan(), set[str]()
    for number, start, line in lines_of(file):
        try:
            value = parse_json(line)
        except HttpError as error:
            plan.errors.append(BatchError(code="invalid_json_line", message=str(error), line=number))
            continue
        found = list(_wrong(value, endpoint, seen))
        plan.errors += [error.model_copy(update={"line": number}) for error in found]
        if found:
            if len(plan.errors) >= MAX_ERRORS:
                break
            continue
        seen.add(value["custom_id"])
        body = value["body"]
        plan.starts.append(start)
        plan.stops.append(start + len(line))
        plan.weights.append(num_answers(body))
        if plan.model is None and isinstance(body.get("model"), str):
            plan.model = body["model"][:256]
    if not plan.errors and not len(plan):
        plan.errors.append(BatchError(code="empty_file", message="the input file has no request in it"))
    if len(plan) > MAX_REQUESTS:
        message = f"the input file has more than {MAX_REQUESTS} requests, the most of one batch"
        plan.errors.append(BatchError(code="too_many_tasks", message=message))
    return plan


def _wrong(value: Any, endpoint: str, seen: set[str]) -> Iterator[BatchError]:
    if not isinstance(value, dict):
        yield BatchError(code="invalid_json_line", message="the line is no JSON object")
        return
    custom_id, method, url, body = (value.get(name) for name in ("custom_id", "method", "url", "body"))
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= _MAX_ID_CHARS:
        message = f"'custom_id' is a text of 1 to {_MAX_ID_CHARS} characters, by which the answer is found"
        yield BatchError(code="missing_required_parameter", message=message, param="custom_id")
    elif custom_id in seen:
        message = f"the custom_id {custom_id!r} is another line's already: each has its own"
        yield BatchError(code="duplicate_custom_id", message=message, param="custom_id")
    if method != "POST":
        message = f"the method is {_shown(method)}, and 'POST' is the only one"
        yield BatchError(code="invalid_method", message=message, param="method")
    if url != endpoint:
        message = f"the url is {_shown(url)}, and the batch's endpoint is {endpoint!r}"
        yield BatchError(code="url_mismatch", message=message, param="url")
    if not isinstance(body, dict):
        message = "'body' is a JSON object: the request's body"
        yield BatchError(code="missing_required_parameter", message=message, param="body")


def _shown(value: Any) -> str:
    return repr(value[:64]) if isinstance(value, str) else "missing" if value is None else "no text"


def num_answers(body: dict[str, Any]) -> int:
    """Return about how many answers the engine makes for a request that nobody has checked.

    Example:
        >>> num_answers({"prompt": ["a", "b"], "n": 3})
        6
    """
    choices = [value for name in ("n", "best_of") if type(value := body.get(name)) is int]
    prompt = body.get("prompt")
    num_prompts = len(prompt) if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else 1
    return min(max(1, *choices, 0) * num_prompts, _MAX_WEIGHT)


def line_identity(batch_id: str, index: int, attempt: int, created: int) -> Identity:
    """Return all that a line's answer has by chance.

    The seed depends on the batch and the line alone, so that a line that runs again gives the same answer. Ids of
    answers may not be used twice at a time, so that a further attempt of the same server has another.

    Args:
        batch_id: The batch's.
        index: Of the request in it, from 0.
        attempt: From 0, in the life of a server.
        created: Time of the answer, in seconds since the epoch.
    """
    key = _digest(f"{batch_id}/{index}/{attempt}", 16)
    return Identity(key, created, seed_of(batch_id, index))


def seed_of(batch_id: str, index: int) -> int:
    """Return the seed of a request that brings none; 63 bits."""
    return int(_digest(f"{batch_id}/{index}/seed", 8), 16) >> 1


def request_id_of(batch_id: str, index: int) -> str:
    """Return the id of a line's request, the same whenever it runs."""
    return f"batch_req_{_digest(f'{batch_id}/{index}', 16)}"


def _digest(text: str, nbytes: int) -> str:
    return hashlib.blake2b(text.encode(), digest_size=nbytes).hexdigest()


def answer_line(request_id: str, custom_id: str, status: int, body: bytes) -> bytes:
    """Return a line of the output or error file for a request that was answered.

    Args:
        request_id: From :func:`request_id_of`.
        custom_id: The client's.
        status: Of HTTP.
        body: JSON without line ends.

    Example:
        >>> answer_line("batch_req_1", "a", 200, b"{}")
        b'{"id":"batch_req_1","custom_id":"a","response":{"status_code":200,"request_id":"batch_req_1","body":{}},"error":null}'
    """
    own, name = json.dumps(request_id).encode(), json.dumps(custom_id).encode()
    for char in _LINE_ENDS:  # to Python's splitlines; in JSON they are only within texts
        body = body.replace(char.encode(), b"\\u%04x" % ord(char))
    head = b'{"id":%b,"custom_id":%b,"response":{"status_code":%d,"request_id":%b,"body":' % (own, name, status, own)
    return head + body + b'},"error":null}'


def missing_line(request_id: str, custom_id: str, code: str, message: str) -> bytes:
    """Return a line of the error file for a request that did not run."""
    error = {"code": code, "message": message}
    line = {"id": request_id, "custom_id": custom_id, "response": None, "error": error}
    return json.dumps(line, separators=(",", ":")).encode()
