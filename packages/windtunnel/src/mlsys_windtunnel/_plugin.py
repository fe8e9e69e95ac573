"""Registration of this package with mlsys; imports nothing heavy."""

from __future__ import annotations

from collections.abc import Iterable

from mlsys_core.plugins.hookspecs import hookimpl
from mlsys_core.plugins.specs import CommandSpec, DemoStepSpec, EngineSpec, KernelSpec


@hookimpl
def mlsys_register_commands() -> Iterable[CommandSpec]:
    """Register ``mlsys windtunnel``."""
    return [
        CommandSpec(
            name="windtunnel",
            help="Turn fitted classical pipelines into trainable networks.",
            app="mlsys_windtunnel.cli.main:app",
        )
    ]


@hookimpl
def mlsys_register_engines() -> Iterable[EngineSpec]:
    """Return the engine of pipelines, ``mlsys serve windtunnel``."""
    return [
        EngineSpec(
            name="windtunnel",
            help="Translated pipelines, by rows of JSON and the Open Inference Protocol.",
            app="mlsys_windtunnel.cli.serve:serve_app",
        )
    ]


@hookimpl
def mlsys_register_kernels() -> Iterable[KernelSpec]:
    """Return the native kernels."""
    return [
        KernelSpec(
            name="windtunnel-models", help="Trees and linear models.", factory="mlsys_windtunnel.modules.native:MODELS"
        ),
        KernelSpec(
            name="windtunnel-soft-trees",
            help="Soft trees, forward and backward.",
            factory="mlsys_windtunnel.backends.soft.native:SOFT_TREES",
        ),
    ]


@hookimpl
def mlsys_register_demo_steps() -> Iterable[DemoStepSpec]:
    """Return the demo's steps: a LightGBM pipeline on real flights, translated; and such a pipeline trained further."""
    return [
        DemoStepSpec(
            name="windtunnel",
            help="WindTunnel: a LightGBM pipeline on real flights, as a network",
            run="mlsys_windtunnel.cli.demo:run",
            order=30,
            devices=("*",),
        ),
        DemoStepSpec(
            name="windtunnel-fine-tune",
            help="WindTunnel: the pipeline trained further as a whole, AUC before and after",
            run="mlsys_windtunnel.cli.demo_fine_tune:run",
            order=31,
            devices=("*",),
        ),
    ]
