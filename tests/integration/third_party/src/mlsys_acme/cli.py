import typer

app = typer.Typer()


@app.command()
def greet() -> None:
    """Greet."""
    typer.echo("hello from acme")
