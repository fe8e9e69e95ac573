"""Register this package with mlsys; imports nothing heavy."""

from __future__ import annotations

from collections.abc import Iterable

from mlsys_core.plugins.hookspecs import hookimpl
from mlsys_core.plugins.specs import CommandSpec, DemoStepSpec, EngineSpec, ModelLoaderSpec, PolicySpec


@hookimpl
def mlsys_register_commands() -> Iterable[CommandSpec]:
    """Return the command ``mlsys dvabatch``."""
    return [
        CommandSpec(
            name="dvabatch",
            help="Let requests join and leave a batch between the stages of a model.",
            app="mlsys_dvabatch.cli.main:app",
        )
    ]


@hookimpl
def mlsys_register_engines() -> Iterable[EngineSpec]:
    """Return the engine of stages, ``mlsys serve dvabatch``."""
    return [
        EngineSpec(
            name="dvabatch",
            help="DNNs in stages, between which requests join and leave, over the Open Inference Protocol.",
            app="mlsys_dvabatch.cli.main:serve_app",
        )
    ]


@hookimpl
def mlsys_register_policies() -> Iterable[PolicySpec]:
    """Return the batching policies; a third party's is registered in the same way, as ``dvabatch-NAME``."""
    policies = [
        ("input", "Clusters of similar lengths, run in parallel (Policy I).", "input:InputPolicy"),
        ("operator", "Batches split in halves where that pays (Policy II).", "operator:OperatorPolicy"),
        ("load", "Later requests join a batch on its way (Policy III).", "load:LoadPolicy"),
        ("load-operator", "Policies II and III together.", "load:LoadOperatorPolicy"),
        ("early-exit", "Requests leave or skip stages by their intermediate results.", "load:EarlyExitPolicy"),
        ("lazy", "LazyBatch: stretch only.", "load:LazyPolicy"),
        ("packed", "Batches without padding, for encoders.", "input:PackedPolicy"),
        ("plain", "New batches only, in the pipeline of stages.", "base:Policy"),
    ]
    return [
        PolicySpec(
            name=f"dvabatch-{name}",
            kind="batching",
            help=help_,
            factory=f"mlsys_dvabatch.scheduling.policies.{factory}",
        )
        for name, help_, factory in policies
    ]


@hookimpl
def mlsys_register_model_loaders() -> Iterable[ModelLoaderSpec]:
    """Return the loader of graphs that can be sliced."""
    return [
        ModelLoaderSpec(
            name="dvabatch-graph",
            help="Exported programs and ONNX files.",
            engine="dvabatch",
            suffixes=(".pt2", ".onnx"),
            factory="mlsys_dvabatch.stages.zoo:load_graph",
        ),
    ]


@hookimpl
def mlsys_register_demo_steps() -> Iterable[DemoStepSpec]:
    """Return the step of ``mlsys demo``: sentence embeddings under three policies."""
    return [
        DemoStepSpec(
            name="dvabatch",
            help="Sentence embeddings under three batching policies",
            run="mlsys_dvabatch.cli.demo:run",
            order=60,
            devices=("*",),
        )
    ]
