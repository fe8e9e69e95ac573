"""Running a function over blocks of rows on several threads: how trees answer many rows without gradients.

An operation on a block is too small for torch to split over its own threads, and its temporaries stay in the cache.
Torch's threads meet at a barrier after every operation, which a shared machine makes expensive; here a thread that
is held up holds up nobody.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor


def map_row_blocks(function: Callable[[Tensor], Tensor], x: Tensor, rows_per_block: int) -> Tensor:
    """Apply ``function`` to ``x`` block by block; rows come first in ``x`` and in what it returns.

    Runs without gradients, on as many threads as torch is set to use.
    """
    blocks = torch.split(x, rows_per_block)

    def run(block: Tensor) -> Tensor:
        with torch.inference_mode():  # is a property of the thread
            return function(block)

    num_threads = min(torch.get_num_threads(), len(blocks))
    if num_threads < 2:
        return torch.cat([run(block) for block in blocks])
    with ThreadPoolExecutor(num_threads) as pool:
        return torch.cat(list(pool.map(run, blocks)))
