"""The command ``mlsys orca quantize``: a model to a GGUF file of fewer bits."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from mlsys_core.cli import completion
from mlsys_orca.cli.options import MODEL_HELP, num_threads_of

app = typer.Typer()


@app.command()
def quantize(
    model: Annotated[str, typer.Argument(help=MODEL_HELP, autocompletion=completion.models)],
    out: Annotated[Path, typer.Argument(help="The GGUF file to write.", metavar="OUT.gguf")],
    kind: Annotated[
        str,
        typer.Option(
            "--type",
            help="Q4_K_M, Q4_K_S, Q5_K_M, Q5_K_S, Q6_K, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, F16, BF16 or F32, the mixes of "
            "types that llama.cpp gives these names.",
        ),
    ] = "Q4_K_M",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace OUT.gguf if there is one.")] = False,
    threads: Annotated[int, typer.Option(min=0, help="Threads that quantise; 0: all cores this process may use.")] = 0,
) -> None:
    """Write a model as a GGUF file of fewer bits, tokenizer and chat template included.

    Example: mlsys orca quantize my-model my-model.Q4_K_M.gguf --type Q4_K_M
    """
    from mlsys_core.config import settings
    from mlsys_core.models import resolve_model
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    path = resolve_model(model, settings().cache_dir)
    errors = Console(stderr=True)
    columns = [TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn()]
    with Progress(*columns, console=errors, transient=True) as progress:
        task = progress.add_task(f"planning {out.name}", total=None)
        from mlsys_gguf_tools.writing import plan, write  # here: the bar shows while torch is imported

        planned = plan(path, out, kind, overwrite=overwrite)
        if planned.source.is_quantised:
            errors.print(
                f"{path.name} is quantised already: what that lost stays lost, and this loses more", soft_wrap=True
            )
        progress.reset(task, description=f"writing {out.name}", total=planned.num_values)
        write(
            planned,
            out,
            num_threads=num_threads_of(threads),
            progress=lambda done, total: progress.update(task, completed=done, total=total),
        )
    typer.echo(
        f"{out}: {planned.num_values:,} weights, {planned.bits_per_weight:.2f} bits each, "
        f"{out.stat().st_size / 2**20:,.1f} MiB"
    )
