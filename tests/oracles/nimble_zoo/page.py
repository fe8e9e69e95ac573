"""The page of models that Nimble refuses, as ``full.py --write`` makes it."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from tests.oracles.nimble_zoo.compare import Tally

_OPENING = """# Nimble: models that are refused

Models of torchvision and transformers with random weights, run beside eager: which of them Nimble refuses, and why.
`fallback="eager"` and `torch.compile` run those, too. Made by `python -m tests.oracles.nimble_zoo.full --write`,
which runs every model that its time allows through `prepare`, and a fixed sample of them through the native
executor, `fallback="eager"`, `torch.compile` and training. After a comma: the way that was taken. Models that the last
run did not reach are listed as an earlier run found them.
"""
NO_TIME = "no time was left"


def earlier(text: str, names: Collection[str]) -> tuple[dict[str, str], dict[str, str]]:
    """Return what a page says of some models: cases that were refused, and models that were not run, with reasons."""
    refused = re.findall(r"^\| (.*?) \| (.*) \|$", text, re.MULTILINE)
    left_out = re.findall(r"^- (\w+): (.*)$", text, re.MULTILINE)
    return (
        {case: why.replace("\\|", "|") for case, why in refused if case.partition(",")[0] in names},
        {name: why for name, why in left_out if name in names},
    )


def page(tally: Tally, left_out: Mapping[str, str], num_run: Mapping[str, int], before: str = "") -> str:
    """Return the page in Markdown; ``before``: the page as it was."""
    not_reached = [name for name, why in left_out.items() if why == NO_TIME]
    known, not_run = earlier(before, not_reached)
    refused = {**known, **tally.refused}
    not_run |= {name: why for name, why in left_out.items() if why != NO_TIME or not before}
    ran = ", ".join(f"{count} models of {area}" for area, count in num_run.items())
    lines = [
        _OPENING,
        f"Last run: {ran}. Tally: {tally.line().partition(': ')[2]}.",
        "",
        "| case | reason |",
        "| --- | --- |",
        *(f"| {name} | {why.replace('|', chr(92) + '|')} |" for name, why in sorted(refused.items())),
        "",
        "Not run:",
        "",
        *(f"- {name}: {why}" for name, why in sorted(not_run.items())),
        "",
    ]
    if tally.unstable:
        lines += ["Rounding decides the result of these, in eager, too; in float64 Nimble's is equal:", ""]
        lines += [*(f"- {name}" for name in sorted(tally.unstable)), ""]
    return "\n".join(lines)
