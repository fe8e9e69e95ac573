"""``python -m mlsys_core`` is ``mlsys``."""

from mlsys_core.cli.main import main

main()
