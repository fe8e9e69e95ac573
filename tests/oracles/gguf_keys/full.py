"""Every key of GGUF's list for every family, at other values, alone and beside another key: ``full.py``.

The list is that of the ``gguf`` library. ``tests/orca/models/test_gguf_keys.py`` says which values mean nothing to
llama.cpp, and draws a part of this.
"""

from __future__ import annotations

import sys
from itertools import product
from random import Random
from typing import Any

from tests.oracles.tally import Tally
from tests.orca.models.test_gguf_keys import BASE, FILES, KNOWN, VALUES, verdict

PAIRS = 2000  # of each family
# A value that the first states is the default of the second, or stands in for it.
SAY_THE_SAME = [
    {"rope.scaling.factor", "rope.scale_linear"},
    {"attention.head_count", "attention.head_count_kv"},
    {"attention.key_length", "attention.value_length"},
    {"block_count", "attention.sliding_window_pattern"},
]


def main() -> int:
    """Print faults and the tally; return 1 if a key is ignored or an exception is raw."""
    tally = Tally()

    def count(architecture: str, base: dict[str, Any], key: str, value: Any) -> str:
        found = verdict(architecture, base, key, value)
        tally.add("equal" if found == "obeyed" else found, f"{architecture} {base} with {key} = {value!r}")
        return found

    for architecture, own in FILES.items():
        base, random = BASE | own, Random(0)
        obeyed = [each for each in product(KNOWN, VALUES) if count(architecture, base, *each) == "obeyed"]
        for _ in range(PAIRS):
            (first, value), second, other = random.choice(obeyed), random.choice(KNOWN), random.choice(VALUES)
            if {first, second} not in SAY_THE_SAME and second not in (first, f"{first}_swa"):
                count(architecture, base | {first: value}, second, other)
    print(f"{tally.counts['none']:,} more say nothing")
    return tally.report("gguf_keys")


if __name__ == "__main__":
    sys.exit(main())
