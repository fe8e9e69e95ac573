"""The command ``mlsys orca reload``: have a running server load another model or adapters, without a lost request."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer
from mlsys_core.errors import ServingError
from mlsys_orca.cli.options import ActivationsForm, Adapters, Dtype, Weights, adapter_directories

_OUT_OF_TIME = 504
_LOOK_S = 0.2  # between two looks how many requests are left


def reload(
    url: Annotated[str, typer.Argument(help="The server's base URL.")] = "http://127.0.0.1:8000",
    model: Annotated[
        str | None,
        typer.Option(help="The next model: a name or a path on the server's machine. By default the same, read anew."),
    ] = None,
    name: Annotated[str | None, typer.Option(help="Its name for clients; by default as at the start.")] = None,
    adapter: Adapters = None,
    dtype: Dtype = None,
    weights: Weights = None,
    activations: ActivationsForm = None,
    api_key: Annotated[
        str | None,
        typer.Option(help="Sent as bearer token.", envvar=["MLSYS_ORCA_API_KEY", "MLSYS_SERVE_API_KEY"]),
    ] = None,
) -> None:
    """Have a server of 'mlsys orca serve --model-control' load a model or adapters anew, while it goes on serving.

    The server loads beside the model that it serves, then new requests go to the next one; running ones are finished by
    the one before. Adapters that are not given stay, unless the model changes. If loading fails nothing has changed.

    Example: mlsys orca reload http://127.0.0.1:8000 --model smollm2-135m-instruct
    """
    import httpx

    fields: dict[str, Any] = {"model": model, "name": name, "dtype": dtype, "weights": weights}
    fields["activations"] = activations
    if adapter is not None:
        fields["adapters"] = adapter_directories(adapter)
    body = {key: value for key, value in fields.items() if value is not None}
    route = url.rstrip("/").removesuffix("/v1") + "/v1/reload"
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        with httpx.Client(timeout=None, headers=headers) as client:
            before, began_s = _json(client.get(route))["generation"], time.monotonic()
            typer.echo("loading ...")
            response = client.post(route, json=body)
            if response.status_code == _OUT_OF_TIME:  # of the request; the server loads on
                while _json(client.get(route))["loading"] is not None:
                    time.sleep(_LOOK_S)
                if _json(client.get(route))["generation"] == before:
                    raise ServingError("the model could not be loaded; the server's log says why")
            else:
                _json(response)
            line, told = f"ready: {time.monotonic() - began_s:.1f} s; ", 0
            while left := _json(client.get(route))["draining"]:
                if (running := sum(left.values())) not in (0, told):
                    typer.echo(f"{line}draining {running} requests")
                    line, told = "", running
                time.sleep(_LOOK_S)
            typer.echo(f"{line}done")
    except httpx.HTTPError as error:
        raise ServingError(f"no answer from {route}: {error or type(error).__name__}; is the server up?") from error


def _json(response: Any) -> Any:
    """Return the body of an answer.

    Raises:
        ServingError: it is an error; the message is the server's.
    """
    try:
        body = response.json()
    except ValueError as error:
        raise ServingError(f"{response.url} answers {response.status_code} and no JSON: is it mlsys orca?") from error
    if response.status_code != 200:
        raise ServingError(body.get("error", {}).get("message") or f"the server answers {response.status_code}")
    return body
