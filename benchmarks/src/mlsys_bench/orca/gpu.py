"""The suite ``orca-gpu``: each Triton kernel, and whole iterations of a decoder, against torch's operators.

Cases take turns, and their results are compared before any time counts. Kernels are timed by Triton's own ``do_bench``
(events on the device, the cache cleared before each call); iterations by the clock of the host, from the batch that the
scheduler hands over to the logits. Attention has two opponents: torch's scaled dot-product attention request by
request, which is what a model without the kernel runs, and one call of it over keys that were gathered and padded
beforehand for free, which no paged server has but no kernel should be far from.

    mlsys bench orca-gpu --device cuda
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from mlsys_core.errors import InvalidInputError

from mlsys_bench.harness.text import rows_section

if TYPE_CHECKING:
    from mlsys_core.bench import BenchContext
    from mlsys_core.report import Section


def run(context: BenchContext) -> Section:
    """Measure all kernels and iterations; quick has half of the shapes and fewer turns.

    Raises:
        InvalidInputError: torch sees no CUDA device.
    """
    if not torch.cuda.is_available():
        raise InvalidInputError("torch sees no CUDA device here, so nothing was measured")
    from mlsys_bench.orca import gpu_cases as cases

    device, names = torch.device(context.device), cases.QUICK if context.is_quick else tuple(cases.ITERATIONS)
    num_rounds, repeats = (3, 7) if context.is_quick else (7, 25)
    context.console.print("attention, operators, iterations ...")
    with torch.inference_mode():
        rows = [
            *cases.attention_rows(names, device, num_rounds),
            *(row for num_tokens in (1, 64, 2048) for row in cases.operator_rows(num_tokens, device, num_rounds)),
            *cases.iteration_rows(names, device, repeats),
        ]
    return rows_section("Orca: on a GPU", rows, "Medians.", device=torch.cuda.get_device_name(device))
