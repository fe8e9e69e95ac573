"""A third party's package that registers something of every kind; ``test_third_party.py`` uses each."""

from mlsys_core.plugins import hookimpl, specs


@hookimpl
def mlsys_register_commands():
    return [
        specs.CommandSpec(name="acme", help="Greet.", app="mlsys_acme.cli:app"),
        specs.CommandSpec(name="trace acme", help="Greet.", app="mlsys_acme.cli:app"),  # below another's command
    ]


@hookimpl
def mlsys_register_devices():
    return [specs.DeviceSpec(name="acme", help="Threads that are noted.", factory="mlsys_acme.device:AcmeDevice")]


@hookimpl
def mlsys_register_memory_pools():
    return [
        specs.MemoryPoolSpec(name="acme-blocks", kind="blocks", help="Noted.", factory="mlsys_acme.pools:AcmeBlocks"),
        specs.MemoryPoolSpec(name="acme-runs", kind="runs", help="Noted.", factory="mlsys_acme.pools:AcmeRuns"),
    ]


@hookimpl
def mlsys_register_compilers():
    return [specs.CompilerSpec(name="acme", help="As they are.", factory="mlsys_acme.compiler:compile_module")]


@hookimpl
def mlsys_register_kernels():
    return [specs.KernelSpec(name="acme-answer", help="42.", factory="mlsys_acme.kernel:ANSWER")]


@hookimpl
def mlsys_register_engines():
    return [specs.EngineSpec(name="acme", help="Says what it hears.", app="mlsys_acme.engine:app")]


@hookimpl
def mlsys_register_policies():
    return [
        specs.PolicySpec(name="acme", kind="scheduling", help="Noted.", factory="mlsys_acme.policies:scheduler"),
        specs.PolicySpec(name="dvabatch-acme", kind="batching", help="Noted.", factory="mlsys_acme.policies:batching"),
    ]


@hookimpl
def mlsys_register_model_loaders():
    loaders = {
        "orca": ".acme-llm",
        "batchmaker": "acme-cells.json",
        "dvabatch": ".acme-net",
    }
    return [
        specs.ModelLoaderSpec(
            name=f"acme-{engine}",
            help="Noted.",
            engine=engine,
            suffixes=(suffix,),
            factory=f"mlsys_acme.loaders:{engine.replace('-', '_')}",
        )
        for engine, suffix in loaders.items()
    ]


@hookimpl
def mlsys_register_converters():
    return [
        specs.ConverterSpec(
            name="acme",
            help="Numbers halved.",
            source="mlsys_acme.converter:Halver",
            factory="mlsys_acme.half:convert",
        )
    ]


@hookimpl
def mlsys_register_exporters():
    return [specs.ExporterSpec(name="acme-csv", help="Spans as CSV.", factory="mlsys_acme.exporter:write")]


@hookimpl
def mlsys_register_benchmarks():
    return [
        specs.BenchmarkSpec(
            name="acme", help="Counts to three.", run="mlsys_acme.suites:bench", devices=("cpu", "acme")
        )
    ]


@hookimpl
def mlsys_register_demo_steps():
    return [
        specs.DemoStepSpec(name="acme", help="A greeting", run="mlsys_acme.suites:demo", devices=("acme",), order=1)
    ]


@hookimpl
def mlsys_register_server_extensions():
    return [
        specs.ServerExtensionSpec(
            name="acme",
            help="A greeting beside the model.",
            systems=("orca",),
            factory="mlsys_acme.extension:extend",
            options="mlsys_acme.extension:Options",
        )
    ]
