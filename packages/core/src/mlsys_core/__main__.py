"""Run ``python -m mlsys_core`` as ``mlsys``."""

from mlsys_core.cli.main import main

main()
