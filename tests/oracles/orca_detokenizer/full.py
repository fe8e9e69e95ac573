"""Text of random token sequences as they come, beside that of all at once: ``full.py [SEQUENCES]``."""

from __future__ import annotations

import random
import sys

from tests.oracles.orca_detokenizer.sequences import build, fault


def main(num_sequences: int) -> int:
    """Print faults and the tally; return 1 if anything is wrong."""
    wrong = 0
    for name, tokenizer in build().items():
        for seed in range(num_sequences // 5):
            if (found := fault(random.Random(seed), tokenizer)) is not None:
                wrong += 1
                print(f"  wrong: {name}, seed {seed}: {found}", flush=True)
    total = num_sequences // 5 * 5
    print(f"orca_detokenizer: {total:,} cases: {total - wrong:,} equal, 0 refused, {wrong:,} wrong, 0 raw")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 100_000))
