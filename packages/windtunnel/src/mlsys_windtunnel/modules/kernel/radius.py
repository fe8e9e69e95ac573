"""Votes and averages of the neighbours within a radius; local outlier factors, which compare densities."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch
from mlsys_core.errors import InvalidInputError
from mlsys_windtunnel.modules.base import parameter
from mlsys_windtunnel.modules.kernel import neighbors
from mlsys_windtunnel.modules.kernel.kernels import distances
from mlsys_windtunnel.modules.kernel.metrics import Distance
from mlsys_windtunnel.modules.kernel.neighbors import ALLOWED, NeighborAverage
from mlsys_windtunnel.modules.ties import sizes, uncertainty
from torch import Tensor, nn


class RadiusAverage(nn.Module):
    """The average of the values of all samples within a radius, plain or weighted by inverse distance.

    Samples and values are trainable; the samples feel a gradient only through distance weights.

    Args:
        samples: ``[samples, features]``.
        values: Values to average, ``[samples, outputs]``: targets, or one-hot classes.
        lonely: Answer to rows without neighbours, ``[outputs]``; None refuses them.
        radius: Largest distance of a neighbour.
        p: Order of the Minkowski distance.
        scale: Factor of each feature, ``[features]``; None: one.
        by_distance: True weights by inverse distance. Samples at distance zero then outweigh all others.
        by_product: True if the source computes distances by a matrix product.
        distance: Another distance than Minkowski's; None: that.
    """

    stores_points = True
    scale: Tensor | None
    lonely: Tensor | None
    kinds: Tensor

    def __init__(
        self,
        samples: npt.ArrayLike,
        values: npt.ArrayLike,
        *,
        lonely: npt.ArrayLike | None,
        radius: float,
        p: float,
        scale: npt.ArrayLike | None,
        by_distance: bool,
        by_product: bool,
        distance: Distance | None,
    ) -> None:
        super().__init__()
        self.samples = parameter(samples)
        self.values = parameter(values)
        for name, table in (("scale", scale), ("lonely", lonely)):
            self.register_buffer(name, None if table is None else torch.from_numpy(np.array(table, np.float64)))
        self.register_buffer("kinds", torch.unique(self.values.detach(), dim=0, return_inverse=True)[1])
        self.radius, self.p, self.by_distance, self.by_product = float(radius), p, by_distance, by_product
        self.distance = distance

    def forward(self, x: Tensor) -> Tensor:
        """Return averages ``[rows, outputs]``."""
        return self._average(x)[0]

    def judged(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return what ``forward`` does, and which rows' answers follow from rounding, ``[rows]`` bool.

        A sample may lie on the rim, or so near that its inverse distance is of rounding alone. In an exported program,
        which cannot raise, rows that are refused for want of neighbours are such rows too.

        Raises:
            InvalidInputError: rows without neighbours are refused, and there are some.
        """
        table, is_lonely = self._average(x)
        unsure = self._is_on_rim(x)
        if self.lonely is None:
            if torch.compiler.is_exporting():
                return table, unsure | is_lonely
            if bool((is_lonely & ~unsure).any()):
                rows = ", ".join(map(str, is_lonely.nonzero()[:5, 0].tolist()))
                raise InvalidInputError(
                    f"No neighbors found for test samples {rows}: fit the source with a larger radius or an "
                    "outlier_label, or leave these rows out"
                )
        return table, unsure

    def _average(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return averages, and which rows have no neighbours."""
        shape, width = (x.shape[0], 1), self.values.shape[1]
        sums, weights = x.new_zeros(shape[0], width), x.new_zeros(shape)
        same_sums, same = x.new_zeros(shape[0], width), x.new_zeros(shape)
        for far, values in zip(self._blocks(x), torch.split(self.values, neighbors.SAMPLES_PER_BLOCK), strict=True):
            inside = far <= self.radius
            if self.by_distance:
                is_same = far == 0
                share = torch.where(inside & ~is_same, 1 / torch.where(is_same, 1, far), 0)
                same_sums = same_sums + is_same.to(x.dtype) @ values
                same = same + is_same.to(x.dtype).sum(dim=1, keepdim=True)
            else:
                share = inside.to(x.dtype)
            sums, weights = sums + share @ values, weights + share.sum(dim=1, keepdim=True)
        has_same = same > 0
        sums, weights = torch.where(has_same, same_sums, sums), torch.where(has_same, same, weights)
        is_lonely = weights == 0
        average = sums / torch.where(is_lonely, 1, weights)
        return average if self.lonely is None else torch.where(is_lonely, self.lonely, average), is_lonely[:, 0]

    def _blocks(self, x: Tensor) -> Iterator[Tensor]:
        """Yield distances ``[rows, samples]`` of one block of samples after another."""
        samples: Tensor = self.samples
        if self.distance is not None:
            x, samples = self.distance.mapped(x), self.distance.mapped(samples)
        elif self.scale is not None:
            x, samples = x * self.scale, samples * self.scale
        for block in torch.split(samples, neighbors.SAMPLES_PER_BLOCK):
            yield distances(x, block, p=self.p) if self.distance is None else self.distance(x, block)

    def _is_on_rim(self, x: Tensor) -> Tensor:
        """Return where a sample may or may not be a neighbour, or weigh what it does, and that shows in the answer."""
        of_points = self.scale if self.scale is not None and self.distance is None else 1
        size = sizes((x * of_points).nan_to_num(), (self.samples * of_points).nan_to_num()).unsqueeze(1)
        radius = torch.full_like(size, self.radius)
        error = 2 * uncertainty(radius, size, by_product=self.by_product)
        noise = 2 * math.sqrt(torch.finfo(x.dtype).eps) * size
        is_sure = torch.zeros_like(size[:, 0], dtype=torch.bool)
        on_rim, low = is_sure, torch.full_like(size[:, 0], len(self.samples), dtype=torch.int64)
        high = torch.full_like(low, -1)
        with torch.no_grad():
            for far, kinds in zip(self._blocks(x), torch.split(self.kinds, neighbors.SAMPLES_PER_BLOCK), strict=True):
                gap = far - self.radius
                at_rim = gap.abs() <= error
                is_sure = is_sure | (gap < -error).any(dim=1)
                on_rim = on_rim | at_rim.any(dim=1)
                if self.by_distance and self.by_product:
                    on_rim = on_rim | (far.square() * ALLOWED < noise.square()).any(dim=1)
                maybe = gap <= error
                low = torch.minimum(low, torch.where(maybe, kinds, len(self.samples)).amin(dim=1))
                high = torch.maximum(high, torch.where(maybe, kinds, -1).amax(dim=1))
        return on_rim & ((low != high) | ~is_sure)


class OutlierFactor(nn.Module):
    """Decision values of local outlier factors: Breunig, Kriegel, Ng, Sander, "LOF", SIGMOD 2000, definitions 5 to 7.

    Args:
        nearby: Search for the nearest samples; its values are ``[samples, 2]``: distance of each sample's ``k``-th
            neighbour, and its local reachability density.
        offset: Subtrahend of the opposite factors.
    """

    stores_points = True

    def __init__(self, nearby: NeighborAverage, *, offset: float) -> None:
        super().__init__()
        self.nearby = nearby
        self.offset = float(offset)

    def forward(self, x: Tensor) -> Tensor:
        """Return decision values ``[rows, 1]``."""
        return self._factor(*self.nearby.found(x)[:2])

    def judged(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return what ``forward`` does, and which rows tie so that it shows in the answer, ``[rows]`` bool."""
        far, indices, unsure = self.nearby.found(x, judges=True)
        return self._factor(far, indices), unsure

    def _factor(self, far: Tensor, indices: Tensor) -> Tensor:
        reach, density = self.nearby.values[indices].unbind(dim=2)
        own = 1 / (torch.maximum(far, reach).mean(dim=1, keepdim=True) + 1e-10)  # as the source has it
        return -(density / own).mean(dim=1, keepdim=True) - self.offset
