"""``mlsys orca bench``: the scheduling policies against each other, and the ORCA paper's evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from mlsys_core.cli.bench import RESULTS, Out
from mlsys_core.cli.registered import BlockPoolName, Device
from mlsys_core.errors import InvalidInputError
from mlsys_orca.cli.options import Dtype, Threads, num_threads_of
from mlsys_orca.loading.named import DEFAULT_MODEL, load

if TYPE_CHECKING:
    from mlsys_core.bench import BenchContext
    from mlsys_core.report import Section

app = typer.Typer(invoke_without_command=True)

Model = Annotated[str, typer.Option(help="A name from 'mlsys models list', a GGUF file, or a model directory.")]
Quick = Annotated[bool, typer.Option(help="Shorter and fewer requests, under three minutes.")]
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
    import dataclasses

    from mlsys_core.workload.parse import parse_lengths
    from mlsys_orca.bench.policies import plan_of, run_plan

    bench_context = context_of(quick, threads, device, output)
    plan = plan_of(bench_context)
    workload = dataclasses.replace(
        plan.workload,
        prompts=parse_lengths(prompts) if prompts else plan.workload.prompts,
        outputs=parse_lengths(outputs) if outputs else plan.workload.outputs,
        num_requests=requests or plan.workload.num_requests,
        shared_prefix=shared_prefix,
    )
    plan = dataclasses.replace(
        plan,
        workload=workload,
        policies=tuple(policy) if policy else plan.policies,
        rates=None if rates is None else parse_rates(rates),
        max_batch_size=max_batch_size,
        num_kv_tokens=kv_tokens,
        memory_pool=memory_pool,
    )
    finish("orca", run_plan(load(model, dtype, device=device), plan, bench_context), bench_context)


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


def context_of(quick: bool, threads: int, device: str, output: Path) -> BenchContext:
    """Return what a suite is told, on this terminal."""
    from mlsys_core.bench import BenchContext
    from rich.console import Console

    return BenchContext(Console(), quick, device, num_threads_of(threads), output)


def finish(name: str, section: Section, context: BenchContext) -> None:
    """Print ``section``, write it to the context's folder, and exit with 1 if it has failed."""
    from mlsys_core.bench import print_section, write_results

    print_section(section, context.console)
    for path in write_results(name, section, context):
        context.console.print(f"Written: {path}", soft_wrap=True, highlight=False)
    if section.status == "failed":
        raise typer.Exit(1)


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
    from mlsys_orca.bench.paper_suite import run_engine, run_simulated

    context = context_of(quick, threads, device, output)
    if simulate:
        section = run_simulated(context, num_requests=requests or (60 if quick else 300))
    else:
        num_requests = requests or (16 if quick else 60)
        section = run_engine(load(model, dtype, device=device), context, scale=scale, num_requests=num_requests)
    finish("orca-paper-simulated" if simulate else "orca-paper", section, context)
