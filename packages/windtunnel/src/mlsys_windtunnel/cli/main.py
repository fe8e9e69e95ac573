"""``mlsys windtunnel``: the group of commands; each has a module of its own."""

from __future__ import annotations

import typer
from mlsys_windtunnel.cli.fine_tune import fine_tune
from mlsys_windtunnel.cli.inspect import inspect
from mlsys_windtunnel.cli.predict import predict
from mlsys_windtunnel.cli.serve import serve
from mlsys_windtunnel.cli.translate import translate
from mlsys_windtunnel.cli.update import moved, update

app = typer.Typer(no_args_is_help=True)


@app.callback()
def windtunnel() -> None:
    """Translate fitted classical pipelines (scikit-learn, LightGBM) into trainable networks."""


app.command()(inspect)
app.command()(translate)
app.command()(predict)
app.command()(serve)
app.command("fine-tune")(fine_tune)
app.command()(update)
app.command()(moved)
