"""``mlsys trace open``: a recording of the score in the page that servers show, offline."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from mlsys_core.errors import InvalidInputError

app = typer.Typer()


@app.command()
def open_recording(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A recording of the score, .json or .json.gz.")],
    output: Annotated[Path | None, typer.Option(help="The page to write; beside FILE if not given.")] = None,
    open_page: Annotated[bool, typer.Option("--open/--no-open", help="Open the page in the browser.")] = True,
) -> None:
    """Open a recording of the score in the page that servers show at /, offline.

    Recordings come from the page, or from a server: curl http://127.0.0.1:8000/ui/score/recording?seconds=60

    Example: mlsys trace open score.json --no-open
    """
    import webbrowser

    from mlsys_core.profiling.files import atomic_write

    from mlsys_score.page import recording_page
    from mlsys_score.recording import read_recording

    recording = read_recording(file)
    page = output or file.with_name(file.name.removesuffix(".gz").removesuffix(".json") + ".html")
    if page.resolve() == file.resolve():
        raise InvalidInputError(f"--output {page} is the recording itself: name another file")
    try:
        with atomic_write(page) as target:
            target.write(recording_page(recording.model_dump(mode="json"), title=file.name).encode())
    except OSError as error:
        raise InvalidInputError(f"cannot write {page}: {error}; name another file with --output") from error
    typer.echo(f"wrote {page}")
    if open_page and not webbrowser.open(page.resolve().as_uri()):
        typer.echo(f"found no browser; open {page} in one", err=True)
