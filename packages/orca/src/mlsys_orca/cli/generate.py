"""``mlsys orca generate``: lines of prompts to lines of answers."""

from __future__ import annotations

import sys
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer
from mlsys_core.cli.options import BlockPoolName, CompilerName, Device
from mlsys_core.collector import kept_out_of_collections
from mlsys_core.errors import InvalidInputError
from mlsys_orca.cli.options import (
    ActivationsForm,
    Adapters,
    ChatTemplateFile,
    Dtype,
    KvDtype,
    MaxBatchSize,
    MaxModelLen,
    ModelOption,
    PipelineParallel,
    ReplicaThreads,
    Speculate,
    TensorParallel,
    Weights,
    adapter_directories,
    is_divided,
    num_threads_of,
    refuse_divided,
)
from mlsys_orca.loading.named import DEFAULT_MODEL, load
from mlsys_orca.parallel.named import find_divided

app = typer.Typer()

_BATCH_SIZE = 16  # prompts per iteration where nobody says


@app.command()
def generate(
    source: Annotated[
        str,
        typer.Argument(help="A file with a prompt per line, as text or as a JSON object; - for standard input."),
    ],
    model: ModelOption = DEFAULT_MODEL,
    output: Annotated[
        Path | None, typer.Option(help="Where answers go, as JSON lines; a new file. None: stdout.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on behind the answers that --output has of the same input.")
    ] = False,
    raw: Annotated[bool, typer.Option("--raw", help="Continue texts instead of answering them in a chat.")] = False,
    max_tokens: Annotated[int, typer.Option(min=1, help="New tokens per answer at most.")] = 256,
    temperature: Annotated[float, typer.Option(min=0, max=2, help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(min=0.0001, max=1)] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Of all prompts that bring none.")] = None,
    max_batch_size: MaxBatchSize = _BATCH_SIZE,
    max_model_len: MaxModelLen = None,
    kv_dtype: KvDtype = None,
    speculate: Speculate = 0,
    memory_pool: BlockPoolName = None,
    compiler: CompilerName = None,
    adapter: Adapters = None,
    chat_template: ChatTemplateFile = None,
    dtype: Dtype = None,
    weights: Weights = None,
    activations: ActivationsForm = None,
    device: Device = "cpu",
    threads: ReplicaThreads = 0,
    tensor_parallel: TensorParallel = 1,
    pipeline_parallel: PipelineParallel = 1,
) -> None:
    """Answer each line of a file; the answers are JSON lines, in the file's order.

    A line is a text, or an object with "prompt" or "messages" and any further field of the HTTP endpoints. With
    --resume a run that was killed goes on where it ended; OUTPUT.resume notes the input and the settings.

    Example: mlsys orca generate questions.txt --output answers.jsonl
    """
    import asyncio

    from mlsys_orca.cli.file_generation import generate_all, num_items, read_items
    from mlsys_orca.cli.resumption import going_on

    if source != "-" and not Path(source).is_file():
        raise InvalidInputError(f"there is no file {source!r}; give a file with a prompt per line, or -")
    degrees: Any = {"tensor_parallel": tensor_parallel, "pipeline_parallel": pipeline_parallel}
    refuse_divided(
        {f"--device {device}": device != "cpu", "--compiler": compiler, "--adapter": adapter},
        **degrees,
    )
    # Whatever answers depend on, and is not in the input.
    settings = {"model": model, "adapters": adapter, "raw": raw, "max_tokens": max_tokens, "temperature": temperature}
    settings |= {"top_p": top_p, "seed": seed, "dtype": dtype, "weights": weights, "device": device}
    settings |= {} if activations is None else {"activations": activations}
    settings |= {} if kv_dtype is None else {"kv_dtype": kv_dtype}
    settings |= {"chat_template": None if chat_template is None else str(chat_template)}
    with going_on(output, source, settings, resumes=resume) as standing:
        parallel = None
        if is_divided(**degrees):
            loaded, parallel = find_divided(
                model, dtype, weights=weights, activations=activations, chat_template=chat_template, **degrees
            )
        else:
            loaded = load(
                model,
                dtype,
                device=device,
                weights=weights,
                activations=activations,
                adapters=adapter_directories(adapter or []),
                runs_in_torch=compiler is not None,
                chat_template=chat_template,
            )
        from mlsys_orca.api.server import make_service, model_name
        from mlsys_orca.engine.engine import EngineConfig
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        as_chat = not raw and loaded.chat_template is not None
        defaults: dict[str, Any] = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "seed": seed}
        config = EngineConfig(
            max_batch_size=max_batch_size or _BATCH_SIZE,
            max_model_len=max_model_len,
            num_threads=num_threads_of(threads, replicas=tensor_parallel * pipeline_parallel),
            policy="paged",
            kv_dtype=kv_dtype,
            memory_pool=memory_pool,
            compiler=compiler,
            num_draft_tokens=speculate,
            **degrees,
        )
        service = make_service(loaded, model_name(model), config, parallel=parallel)
        columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()]
        with (
            sys.stdin if source == "-" else Path(source).open(encoding="utf-8") as lines,
            sys.stdout if output is None else output.open("a", encoding="utf-8") as answers,
            Progress(*columns, console=Console(stderr=True), transient=True) as progress,
            service.engine,
        ):
            total = None if source == "-" else num_items(Path(source))
            task = progress.add_task("answering", total=total, completed=standing.num_done)
            items = islice(read_items(lines), standing.num_done, None)
            with kept_out_of_collections(collects=False):
                asyncio.run(
                    generate_all(
                        service,
                        items,
                        answers,
                        defaults=defaults,
                        as_chat=as_chat,
                        first_index=standing.num_done,
                        seed_of=standing.seed_of,
                        on_done=lambda _: progress.advance(task),
                    )
                )
