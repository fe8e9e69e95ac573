"""``mlsys build``: compile every registered kernel ahead of its first use, into the cache."""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer()


@app.command()
def build(
    only: Annotated[
        list[str] | None, typer.Option("--only", help="Build this kernel alone; may be repeated. Default: all.")
    ] = None,
) -> None:
    """Compile all native kernels ahead of their first use, or say where they come from.

    A wheel has them compiled; a checkout, or a processor that no wheel serves, compiles them once into the cache.
    Run it where there is a compiler, then copy the cache: MLSYS_CACHE_DIR names it, MLSYS_KERNEL_LEVEL the processor.
    The exit code is 1 if a kernel cannot be had.

    Example: MLSYS_KERNEL_LEVEL=x86-64-v3 MLSYS_CACHE_DIR=/opt/mlsys mlsys build
    """
    import time

    from mlsys_core.config import settings
    from mlsys_core.errors import MlsysError
    from mlsys_core.plugins import installed_plugins
    from mlsys_core.plugins.registry import failing_as
    from mlsys_core.plugins.specs import KernelSpec

    registry = installed_plugins().registry
    specs = registry.all(KernelSpec) if not only else [registry.chosen(KernelSpec, name) for name in only]
    failed = False
    for spec in specs:
        start = time.perf_counter()
        try:
            kernel = registry.part(spec)
            with failing_as(spec, registry):
                library = kernel.load()
        except MlsysError as error:
            if settings().debug:
                raise
            failed = True
            typer.echo(f"{spec.name}: not built: {error}", err=True)
            continue
        typer.echo(f"{spec.name}: {library._name} ({time.perf_counter() - start:.1f} s)")
    if failed:
        raise typer.Exit(1)
