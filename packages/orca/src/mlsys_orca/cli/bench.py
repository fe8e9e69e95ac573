"""``mlsys orca bench``: the scheduling policies against each other, and the ORCA paper's evaluation."""

from __future__ import annotations

from typing import Annotated

import typer
from mlsys_core.cli import completion
from mlsys_core.cli.bench import RESULTS, Out, Quick, run_named
from mlsys_core.cli.registered import BlockPoolName, Device
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
    The suite is in mlsys-bench; in a checkout: pip install -e benchmarks.

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


def parse_degrees(texts: list[str]) -> tuple[tuple[int, int], ...]:
    """Return (ranks, stages) of texts like ``3x2``.

    Raises:
        InvalidInputError: one is not written so.

    Example:
        >>> parse_degrees(["1x2", "3x1"])
        ((1, 2), (3, 1))
    """
    found = []
    for text in texts:
        ranks, _, stages = text.partition("x")
        if not (ranks.isdecimal() and stages.isdecimal() and int(ranks) and int(stages)):
            raise InvalidInputError(f"--degrees {text!r} is not written RANKSxSTAGES, like 3x2")
        found.append((int(ranks), int(stages)))
    return tuple(found)


@app.command()
def scale(
    quick: Quick = False,
    model: Model = DEFAULT_MODEL,
    degrees: Annotated[
        list[str] | None, typer.Option(help="RANKSxSTAGES, like 3x2; repeat. By default what fits the model.")
    ] = None,
    dtype: Dtype = None,
    threads: Threads = 0,
    output: Out = RESULTS,
) -> None:
    """Measure a model over several processes against one with --threads threads: throughput, control, bytes.

    Example: mlsys orca bench scale --degrees 3x1 --degrees 1x2
    """
    run_named(
        "orca-scale",
        quick=quick,
        device="cpu",
        threads=num_threads_of(threads),
        out=output,
        model=model,
        dtype=dtype,
        degrees=parse_degrees(degrees or []),
    )


@app.command()
def gap(
    quick: Quick = False,
    model: Model = DEFAULT_MODEL,
    stages: Annotated[int, typer.Option(min=1, help="Stages of the pipeline.")] = 2,
    dtype: Dtype = None,
    output: Out = RESULTS,
) -> None:
    """Measure the time between two iterations, with and without the next message waiting at the worker.

    Example: mlsys orca bench gap --stages 3
    """
    run_named("orca-gap", quick=quick, device="cpu", threads=1, out=output, model=model, dtype=dtype, stages=stages)


@app.command()
def bubbles(quick: Quick = False, model: Model = DEFAULT_MODEL, dtype: Dtype = None, output: Out = RESULTS) -> None:
    """Count the bubbles of a pipeline (the paper's Figure 8): request-level microbatches against iterations.

    Example: mlsys orca bench bubbles --quick
    """
    run_named("orca-bubbles", quick=quick, device="cpu", threads=1, out=output, model=model, dtype=dtype)


@app.command()
def parity(
    quick: Quick = False,
    only: Annotated[
        list[str] | None,
        typer.Option(help="A model of the table, like t5 or 'llama + LoRA'; repeat. By default all."),
    ] = None,
    output: Out = RESULTS,
) -> None:
    """Compare divided models with one process to the bit, under every policy, in processes; print the table.

    Example: mlsys orca bench parity --quick --only llama
    """
    run_named("orca-parity", quick=quick, device="cpu", threads=1, out=output, only=tuple(only or ()))
