"""Registration of this package with mlsys; imports nothing heavy."""

from __future__ import annotations

from collections.abc import Iterable

from mlsys_core.plugins.hookspecs import hookimpl
from mlsys_core.plugins.specs import CommandSpec, DemoStepSpec, EngineSpec, KernelSpec, ModelLoaderSpec


@hookimpl
def mlsys_register_commands() -> Iterable[CommandSpec]:
    """Register ``mlsys batchmaker``."""
    return [
        CommandSpec(
            name="batchmaker",
            help="Batch single cells of recurrent networks instead of whole requests.",
            app="mlsys_batchmaker.cli.main:app",
        )
    ]


@hookimpl
def mlsys_register_engines() -> Iterable[EngineSpec]:
    """Register ``mlsys serve batchmaker``: the cellular engine."""
    return [
        EngineSpec(
            name="batchmaker",
            help="Recurrent networks, batched cell by cell, over the Open Inference Protocol.",
            app="mlsys_batchmaker.cli.main:serve_app",
        )
    ]


@hookimpl
def mlsys_register_model_loaders() -> Iterable[ModelLoaderSpec]:
    """Register the loader of model directories."""
    return [
        ModelLoaderSpec(
            name="batchmaker",
            help="Directories of mlsys batchmaker save.",
            engine="batchmaker",
            suffixes=("manifest.json",),
            factory="mlsys_batchmaker.models.store:load_registered",
        )
    ]


@hookimpl
def mlsys_register_kernels() -> Iterable[KernelSpec]:
    """Return the native kernels."""
    return [
        KernelSpec(
            name="batchmaker-steps",
            help="Cells, several steps a call.",
            factory="mlsys_batchmaker.native.runner:STEPS",
        ),
        KernelSpec(
            name="batchmaker-silero",
            help="Voice activity, a frame of many streams a call.",
            factory="mlsys_batchmaker.models.silero:SILERO",
        ),
        KernelSpec(name="batchmaker-plan", help="Plans of requests.", factory="mlsys_batchmaker.plan.planner:PLAN"),
        KernelSpec(
            name="batchmaker-scheduler",
            help="Forming and completing tasks.",
            factory="mlsys_batchmaker.scheduling.compiled:SCHEDULER",
        ),
    ]


@hookimpl
def mlsys_register_demo_steps() -> Iterable[DemoStepSpec]:
    """Register the demo's step: 300 words to phonemes under load."""
    return [
        DemoStepSpec(
            name="batchmaker",
            help="BatchMaker: words to phonemes, cell by cell",
            run="mlsys_batchmaker.cli.demo:run",
            order=40,
        )
    ]
