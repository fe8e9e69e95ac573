"""Registration of this package with mlsys; imports nothing heavy."""

from __future__ import annotations

from collections.abc import Iterable

from mlsys_core.plugins.hookspecs import hookimpl
from mlsys_core.plugins.specs import CommandSpec, CompilerSpec, DemoStepSpec, KernelSpec


@hookimpl
def mlsys_register_commands() -> Iterable[CommandSpec]:
    """Register ``mlsys nimble``."""
    return [
        CommandSpec(
            name="nimble",
            help="Schedule a model ahead of time, on as many streams as it has independent operators.",
            app="mlsys_nimble.cli.main:app",
        )
    ]


@hookimpl
def mlsys_register_compilers() -> Iterable[CompilerSpec]:
    """Register Nimble as a compiler of modules."""
    return [
        CompilerSpec(
            name="nimble",
            help="A schedule made ahead of time, replayed natively.",
            factory="mlsys_nimble.module:compile",
        )
    ]


@hookimpl
def mlsys_register_kernels() -> Iterable[KernelSpec]:
    """Return the native kernels."""
    return [
        KernelSpec(
            name="nimble-kernels", help="Operators of a schedule.", factory="mlsys_nimble.backends.cpu.library:KERNELS"
        ),
        KernelSpec(
            name="nimble-kernels-bf16",
            help="Products with weights in bf16, and of bf16 pairs.",
            factory="mlsys_nimble.backends.cpu.library:KERNELS_BF16",
        ),
        KernelSpec(
            name="nimble-kernels-int8",
            help="Products of quantised models.",
            factory="mlsys_nimble.backends.cpu.library:KERNELS_INT8",
        ),
        KernelSpec(
            name="nimble-executor",
            help="Replay of a schedule on worker threads.",
            factory="mlsys_nimble.backends.cpu.replay:EXECUTOR",
        ),
        KernelSpec(
            name="nimble-training",
            help="Operators of training steps.",
            factory="mlsys_nimble.training.kernels:TRAINING",
        ),
        KernelSpec(
            name="nimble-digest",
            help="Digests that detect changed weights.",
            factory="mlsys_nimble.state.digest:DIGEST",
        ),
    ]


@hookimpl
def mlsys_register_demo_steps() -> Iterable[DemoStepSpec]:
    """Register the demo of two prepared nets."""
    return [
        DemoStepSpec(
            name="nimble",
            help="Nimble: two nets scheduled ahead of time, beside eager PyTorch",
            run="mlsys_nimble.cli.demo:run",
            order=40,
        )
    ]
