"""``mlsys orca bench``: the scheduling policies against each other, and the ORCA paper's evaluation."""

from __future__ import annotations

from typing import Annotated

import typer
from mlsys_core.cli import completion
from mlsys_core.cli.bench import RESULTS, Out, Quick, run_named
from mlsys_core.cli.options import BlockPoolName, Device
from mlsys_core.errors import InvalidInputError
from mlsys_orca.cli.options import Dtype, KvDtype, Threads, num_threads_of
from mlsys_orca.loading.named import DEFAULT_MODEL

app = typer.Typer(invoke_without_command=True)

Model = Annotated[
    str,
    typer.Option(
        help="A name from 'mlsys models list', a GGUF file, or a model directory.", autocompletion=completion.models
    ),
]
Requests = Annotated[int | None, typer.Option(min=2, help="Requests of each run.")]


@app.callback()
def bench(
    context: typer.Context,
    quick: Quick = False,
    model: Model = DEFAULT_MODEL,
    policy: Annotated[
        list[str] | None, typer.Option(help="A scheduling policy; repeat for several. Default: the four built in.")
    ] = None,
    rates: Annotated[
        str | None,
        typer.Option(help="Requests per second, like 1,2,4. Default: shares of what the best policy does at once."),
    ] = None,
    requests: Requests = None,
    prompts: Annotated[str | None, typer.Option(help="Prompt tokens, like uniform:16:256 or constant:32.")] = None,
    outputs: Annotated[str | None, typer.Option(help="Output tokens, written likewise.")] = None,
    shared_prefix: Annotated[int, typer.Option(min=0, help="Tokens that all prompts begin with, added.")] = 0,
    max_batch_size: Annotated[int, typer.Option(min=1, help="Requests per iteration at most.")] = 32,
    kv_tokens: Annotated[
        int | None, typer.Option(min=16, help="K/V slots; by default a full batch of longest requests.")
    ] = None,
    memory_pool: BlockPoolName = None,
    dtype: Dtype = None,
    kv_dtype: KvDtype = None,
    device: Device = "cpu",
    threads: Threads = 0,
    output: Out = RESULTS,
) -> None:
    """Compare scheduling policies on a real model in this process: all requests at once, then Poisson arrivals.

    Ctrl-C ends it with what was measured. 'mlsys orca bench paper' replays the ORCA paper's evaluation.

    Example: mlsys orca bench --quick --policy orca --policy chunked
    """
    if context.invoked_subcommand is not None:
        return
    run_named(
        "orca",
        quick=quick,
        device=device,
        threads=num_threads_of(threads),
        out=output,
        model=model,
        dtype=dtype,
        policies=tuple(policy or ()),
        rates=() if rates is None else parse_rates(rates),
        requests=requests or 0,
        prompts=prompts or "",
        outputs=outputs or "",
        shared_prefix=shared_prefix,
        max_batch_size=max_batch_size,
        kv_tokens=kv_tokens or 0,
        memory_pool=memory_pool,
        kv_dtype=kv_dtype,
    )


def parse_rates(text: str) -> tuple[float, ...]:
    """Return the positive numbers of a text that separates them by commas.

    Raises:
        InvalidInputError: one is not.

    Example:
        >>> parse_rates("0.5,2")
        (0.5, 2.0)
    """
    try:
        rates = tuple(float(part) for part in text.split(","))
    except ValueError:
        rates = ()
    if not rates or not all(0 < rate < float("inf") for rate in rates):
        raise InvalidInputError(f"--rates is {text!r}: write numbers above 0 and a comma between them, like 1,2,4")
    return rates


@app.command()
def paper(
    simulate: Annotated[
        bool, typer.Option("--simulate", help="The paper's own cluster and lengths, in virtual time; needs no model.")
    ] = False,
    quick: Quick = False,
    model: Model = DEFAULT_MODEL,
    scale: Annotated[float, typer.Option(help="The real engine's lengths, as a share of the paper's.")] = 0.125,
    requests: Requests = None,
    dtype: Dtype = None,
    device: Device = "cpu",
    threads: Threads = 0,
    output: Out = RESULTS,
) -> None:
    """Replay the ORCA paper's evaluation (section 6.2): iteration-level against request-level scheduling.

    Throughput against median latency at several batch sizes, on requests of different lengths and of one length, and
    the ratio of throughput at equal latency. Ctrl-C ends it with what was measured.

    Example: mlsys orca bench paper --simulate
    """
    run_named(
        "orca-paper",
        name="orca-paper-simulated" if simulate else "orca-paper",
        quick=quick,
        device=device,
        threads=num_threads_of(threads),
        out=output,
        backend="simulated" if simulate else "engine",
        model=model,
        dtype=dtype,
        scale=scale,
        requests=requests or 0,
    )
