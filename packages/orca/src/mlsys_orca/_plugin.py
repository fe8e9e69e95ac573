"""Register Orca with mlsys; imports nothing heavy."""

from __future__ import annotations

from collections.abc import Iterable

from mlsys_core.plugins.hookspecs import hookimpl
from mlsys_core.plugins.specs import CommandSpec, DemoStepSpec, EngineSpec, KernelSpec, ModelLoaderSpec, PolicySpec


@hookimpl
def mlsys_register_commands() -> Iterable[CommandSpec]:
    """Return the command ``mlsys orca``, and those below it that the others need not import."""
    below = {
        "generate": "Answer each line of a file.",
        "explain": "Say what fits: weights, keys and values, limits.",
        "chaos": "Trouble a server's processes, and compare its answers.",
    }
    return [
        CommandSpec(name="orca", help="Serve language models, talk to one, or measure.", app="mlsys_orca.cli.main:app"),
        *(
            CommandSpec(name=f"orca {name}", help=about, app=f"mlsys_orca.cli.{name}:app")
            for name, about in below.items()
        ),
    ]


@hookimpl
def mlsys_register_engines() -> Iterable[EngineSpec]:
    """Return the iteration-level engine, ``mlsys serve orca``."""
    return [
        EngineSpec(
            name="orca",
            help="Language models, scheduled by iterations, over the OpenAI protocol.",
            app="mlsys_orca.cli.serve:app",
        )
    ]


@hookimpl
def mlsys_register_policies() -> Iterable[PolicySpec]:
    """Return the scheduling policies of the engine."""
    policies = [
        ("orca", "Iteration-level FCFS with reservation (ORCA, Algorithm 2).", "orca:IterationScheduler"),
        ("paged", "K/V blocks on demand, shared prefixes, preemption by recomputation.", "paged:PagedScheduler"),
        ("chunked", "As paged, with prompts in chunks beside decodes, under a budget.", "chunked:ChunkedScheduler"),
        ("request-level", "Whole batches to their end: the baseline.", "request_level:RequestLevelScheduler"),
    ]
    return [
        PolicySpec(name=name, kind="scheduling", help=help_, factory=f"mlsys_orca.scheduling.{factory}")
        for name, help_, factory in policies
    ]


@hookimpl
def mlsys_register_model_loaders() -> Iterable[ModelLoaderSpec]:
    """Return the loader of GGUF files and Hugging Face directories."""
    return [
        ModelLoaderSpec(
            name="orca-llm",
            help="Llama-like language models.",
            engine="orca",
            suffixes=(".gguf", ".safetensors", "config.json"),
            factory="mlsys_orca.loading.load:load_registered",
        ),
    ]


@hookimpl
def mlsys_register_kernels() -> Iterable[KernelSpec]:
    """Return the native kernels."""
    return [
        KernelSpec(
            name="orca-program",
            help="Decoders: products, attention, norms.",
            factory="mlsys_orca.backends.native.library:PROGRAM",
        ),
    ]


@hookimpl
def mlsys_register_demo_steps() -> Iterable[DemoStepSpec]:
    """Return the step of ``mlsys demo``: a real model through our own server, one by one, then eight at once."""
    return [
        DemoStepSpec(
            name="orca",
            help="Orca: chat with a real model",
            run="mlsys_orca.cli.demo:run",
            order=10,
            devices=("*",),
        )
    ]
