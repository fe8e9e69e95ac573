"""A file in which the package's parts note that they were used."""

import os
from pathlib import Path


def note(text):
    with Path(os.environ["ACME_NOTES"]).open("a", encoding="utf-8") as file:
        file.write(f"{text}\n")
