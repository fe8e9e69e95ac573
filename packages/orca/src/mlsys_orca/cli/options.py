"""Options that the commands below ``mlsys orca`` share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from mlsys_core.cli import completion
from mlsys_core.errors import InvalidInputError
from mlsys_core.posix.machine import num_cores

MODEL_HELP = "A name from 'mlsys models list', a GGUF file, a model directory, or ORG/NAME of a hub."
Model = Annotated[str, typer.Argument(help=MODEL_HELP, autocompletion=completion.models)]
ModelOption = Annotated[
    str,
    typer.Option("--model", help=MODEL_HELP, autocompletion=completion.models),
]
Adapters = Annotated[
    list[str] | None,
    typer.Option(help="NAME=DIRECTORY of a LoRA adapter (PEFT's), which requests then name as their model; repeat."),
]
ChatTemplateFile = Annotated[Path | None, typer.Option(help="A Jinja file in place of the model's own chat template.")]


def _stated(dtype: str | None) -> str | None:
    """Return ``dtype``, None for what suits the device."""
    return None if dtype == "auto" else dtype


Dtype = Annotated[
    str | None,
    typer.Option(
        help="float32 (fp32), bfloat16 (bf16), or auto: what suits the device, the default.", callback=_stated
    ),
]
Weights = Annotated[
    str | None,
    typer.Option(
        help="float: in the dtype. packed: as the GGUF file has them, the same values in less memory. int8, int4: "
        "quantised while loading, smaller and a little less exact. By default packed where that is fast, else float."
    ),
]
ActivationsForm = Annotated[
    str | None,
    typer.Option(
        "--activations",
        help="With packed weights: int8: rows are quantised too, and whole numbers are multiplied, which is "
        "faster and a little less exact. float: rows stay as they are. auto, the default: int8 for models with half a "
        "billion quantised weights in their layers, float for smaller ones, with --dtype fp32 and on machines with "
        "AMX; 'explain' says which.",
    ),
]
KvDtype = Annotated[
    str | None,
    typer.Option(
        "--kv-dtype",
        help="Keys and values are kept in float32, bfloat16, float16, int8 (half of bfloat16's memory), or auto: the "
        "model's dtype, the default.",
        callback=_stated,
    ),
]
MaxBatchSize = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Requests per iteration, of each replica, at most; 'serve' takes what 'mlsys orca explain' prints, 8 of a "
        "divided model.",
    ),
]
MaxModelLen = Annotated[
    int | None, typer.Option(min=2, help="Tokens of prompt and answer; by default the model's own.")
]
Speculate = Annotated[
    int, typer.Option(min=0, max=16, help="Tokens guessed from the text so far behind each; answers stay the same.")
]
Threads = Annotated[
    int, typer.Option(min=0, help="Threads of the model's operators; 0: all cores this process may use.")
]
ReplicaThreads = Annotated[
    int,
    typer.Option(
        min=0,
        help="Threads of the model's operators in each replica, or in each process of a divided one; 0: the cores this "
        "process may use, divided.",
    ),
]
Replicas = Annotated[
    int, typer.Option(min=1, max=32, help="Engines behind one front, each with a process and K/V slots of its own.")
]

TensorParallel = Annotated[
    int, typer.Option(min=1, help="Processes that each layer is divided over, by heads and features.")
]
PipelineParallel = Annotated[
    int, typer.Option(min=1, help="Stages that the layers are divided over; as many iterations run at a time.")
]


def adapter_directories(adapters: list[str]) -> dict[str, str]:
    """Return name -> directory of options written NAME=DIRECTORY.

    Raises:
        InvalidInputError: one is not written so.

    Example:
        >>> adapter_directories(["pirate=adapters/pirate"])
        {'pirate': 'adapters/pirate'}
    """
    pairs = [adapter.partition("=") for adapter in adapters]
    if wrong := [adapter for adapter, (name, _, path) in zip(adapters, pairs, strict=True) if not name or not path]:
        raise InvalidInputError(f"--adapter {wrong[0]!r} is not written NAME=DIRECTORY")
    return {name: path for name, _, path in pairs}


def is_divided(*, tensor_parallel: int, pipeline_parallel: int) -> bool:
    """Return whether processes of their own have the model's parts."""
    return tensor_parallel * pipeline_parallel > 1


def refuse_divided(reasons: dict[str, object], *, tensor_parallel: int, pipeline_parallel: int) -> None:
    """See that nothing was asked for which a divided model has not.

    Args:
        reasons: By option, what was given: anything that is not false is refused.
        tensor_parallel: As given.
        pipeline_parallel: As given.

    Raises:
        InvalidInputError: something was.

    Example:
        >>> refuse_divided({"--compiler": None}, tensor_parallel=2, pipeline_parallel=1)
    """
    divided = is_divided(tensor_parallel=tensor_parallel, pipeline_parallel=pipeline_parallel)
    if divided and (given := [name for name, value in reasons.items() if value]):
        raise InvalidInputError(
            "a model divided by --tensor-parallel or --pipeline-parallel runs in native kernels on the CPU, without "
            f"{given[0]}: leave one of them out"
        )


def num_threads_of(threads: int, *, replicas: int = 1) -> int:
    """Return ``threads``, or if it is 0 the cores this process may use for each of ``replicas``, at least 1."""
    return threads or max(1, num_cores() // replicas)
