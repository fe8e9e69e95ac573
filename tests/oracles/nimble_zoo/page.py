"""The page of models that Nimble refuses, as ``full.py --write`` makes it."""

from __future__ import annotations

from collections.abc import Mapping

from tests.oracles.nimble_zoo.compare import Tally

_OPENING = """# Nimble: models that are refused

Models of torchvision and transformers with random weights, run beside eager: which of them Nimble refuses, and why.
`fallback="eager"` and `torch.compile` run those, too. Made by `python tests/oracles/nimble_zoo/full.py --write`,
which runs every model that its time allows through `prepare`, and a fixed sample of them through the native
executor, `fallback="eager"`, `torch.compile` and training. After a comma: the way that was taken.
"""


def page(tally: Tally, left_out: Mapping[str, str], num_run: Mapping[str, int]) -> str:
    """Return the page in Markdown."""
    ran = ", ".join(f"{count} models of {area}" for area, count in num_run.items())
    lines = [
        _OPENING,
        f"Ran: {ran}. Tally: {tally.line().partition(': ')[2]}.",
        "",
        "| case | reason |",
        "| --- | --- |",
        *(f"| {name} | {why.replace('|', chr(92) + '|')} |" for name, why in sorted(tally.refused.items())),
        "",
        "Not run:",
        "",
        *(f"- {name}: {why}" for name, why in sorted(left_out.items())),
        "",
    ]
    if tally.unstable:
        lines += ["Rounding decides the result of these, in eager, too; in float64 Nimble's is equal:", ""]
        lines += [*(f"- {name}" for name in sorted(tally.unstable)), ""]
    return "\n".join(lines)
