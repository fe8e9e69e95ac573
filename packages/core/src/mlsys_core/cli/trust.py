"""``--trust-code``: the one option by which a user lets a file run code, the same in every command."""

from __future__ import annotations

from typing import Annotated

import typer

_HELP = "Let files run code while they load (pickles, code of other packages): only if you trust their maker."

TrustPickles = Annotated[bool, typer.Option("--trust-code", "--trust", help=f"{_HELP} --trust is its old name.")]
TrustCode = Annotated[bool, typer.Option("--trust-code", help=_HELP)]
