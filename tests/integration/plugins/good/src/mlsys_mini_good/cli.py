"""The plugin's command; imported only when it is called."""

import typer
from mlsys_core.report import Section

app = typer.Typer()


@app.command()
def greet(times: int = 1) -> None:
    """Greet a number of times."""
    typer.echo("hello from mini-good\n" * times, nl=False)


def identity(module, _example_inputs):
    return module


def demo_step(context):
    context.console.print("mini step at work")
    return Section("Mini step", ["It ran."])
