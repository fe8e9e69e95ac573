"""Values to K-quant blocks: Q4_K, Q5_K and Q6_K of GGUF.

Called by :mod:`.blocks`, a piece of a tensor at a time. A super-block has 256 values. Q4_K and Q5_K divide it into
groups of 32 with a scale and a minimum each, Q6_K into groups of 16 with a scale each; these are whole numbers again,
in units that the super-block states in fp16. A group tries a grid of scales; for the codes of each, least squares
weighted by magnitude give the best scale (and minimum), and the candidate with the least error stays. That is the
search that llama.cpp documents (pull requests 1684 and 2707), here for all groups of a piece at once. Layouts:
https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h
"""

from __future__ import annotations

import torch
from torch import Tensor

SUPER_BLOCK = 256  # values
_TINY = 1e-15  # a group whose values are all below has only zeros


def q4_k(values: Tensor) -> Tensor:
    """Return fp32 ``values`` [num_blocks, 256] as blocks: uint8 [num_blocks, 144]."""
    header, codes = _with_minima(values, most=15, first=-1.0, step=0.1, num_steps=20)
    return torch.cat((header, _nibbles(codes)), dim=1)


def q5_k(values: Tensor) -> Tensor:
    """Return fp32 ``values`` [num_blocks, 256] as blocks: uint8 [num_blocks, 176]."""
    header, codes = _with_minima(values, most=31, first=-0.5, step=0.1, num_steps=15)
    bits = (codes >> 4 << torch.arange(8, dtype=torch.uint8)[:, None]).sum(dim=1, dtype=torch.uint8)
    return torch.cat((header, bits, _nibbles(codes & 15)), dim=1)


def q6_k(values: Tensor) -> Tensor:
    """Return fp32 ``values`` [num_blocks, 256] as blocks: uint8 [num_blocks, 210]."""
    groups = values.view(-1, 16, 16)
    wanted = _symmetric_scales(groups, most=32)  # [num_blocks, 16]
    largest = wanted.gather(1, wanted.abs().argmax(dim=1, keepdim=True))
    unit = torch.where(largest.abs() < _TINY, 0.0, -largest / 128)
    scales = _quotients(wanted, unit).round_().clamp_(-128, 127)
    unit = unit.half()
    codes = _quotients(groups, (unit.float() * scales)[..., None]).round_().clamp_(-32, 31)
    # Half a super-block at a time: value l + 32 * q has its low 4 bits in byte l + 32 * (q % 2), its high 2 in byte l.
    parts = (codes + 32).to(torch.uint8).view(-1, 2, 4, 32)
    low, high = parts & 15, parts >> 4
    lows = torch.cat((low[:, :, 0] | low[:, :, 2] << 4, low[:, :, 1] | low[:, :, 3] << 4), dim=2)
    highs = high[:, :, 0] | high[:, :, 1] << 2 | high[:, :, 2] << 4 | high[:, :, 3] << 6
    as_bytes = scales.to(torch.int8).view(torch.uint8)
    return torch.cat((lows.flatten(1), highs.flatten(1), as_bytes, unit.view(torch.uint8)), dim=1)


def _with_minima(values: Tensor, *, most: int, first: float, step: float, num_steps: int) -> tuple[Tensor, Tensor]:
    """Quantise groups of 32 to codes from 0 to ``most``, times a scale, less a minimum.

    Returns:
        Units, scales and minima as bytes [num_blocks, 16], and codes uint8 [num_blocks, 8, 32].
    """
    groups = values.view(-1, 8, 32)
    scales, minima = _scales_and_minima(groups, most=most, first=first, step=step, num_steps=num_steps)
    units = torch.stack((scales, minima)).amax(dim=2, keepdim=True) / 63  # [2, num_blocks, 1]
    whole = _quotients(torch.stack((scales, minima)), units).round_().clamp_(0, 63)
    units = units.half()
    in_floats = (units.float() * whole)[..., None]
    codes = _quotients(groups + in_floats[1], in_floats[0]).round_().clamp_(0, most)
    low, high = whole.to(torch.uint8)[:, :, :4], whole.to(torch.uint8)[:, :, 4:]
    packed = torch.cat((low[0] | high[0] >> 4 << 6, low[1] | high[1] >> 4 << 6, high[0] & 15 | high[1] << 4), dim=1)
    header = torch.cat((units[0].view(torch.uint8), units[1].view(torch.uint8), packed), dim=1)
    return header, codes.to(torch.uint8)


def _scales_and_minima(
    groups: Tensor, *, most: int, first: float, step: float, num_steps: int
) -> tuple[Tensor, Tensor]:
    """Return the scale and the minimum, both at least 0, of each group of ``groups`` [..., size].

    The candidates put the largest code at ``most + first``, and on in steps: beyond ``most``, codes are cut. Each
    counts from the best minimum so far, as least squares moves that.
    """
    weights = groups.square().mean(dim=-1, keepdim=True).sqrt_() + groups.abs()
    largest = groups.amax(dim=-1)
    minimum = -groups.amin(dim=-1).clamp_(max=0)  # subtracted from the scaled codes
    weighted = weights * groups
    sum_w, sum_x = weights.sum(dim=-1), weighted.sum(dim=-1)

    def codes_up_to(top: float) -> Tensor:
        factor = _quotients(torch.full_like(minimum, top), largest + minimum)[..., None]
        return ((groups + minimum[..., None]) * factor).round_().clamp_(0, most)

    def error_of(codes: Tensor, scale: Tensor, minimum: Tensor) -> Tensor:
        wrong = codes * scale[..., None] - minimum[..., None] - groups
        return (wrong.square_() * weights).sum(dim=-1)

    scale = (largest + minimum) / most  # the codes span the values exactly
    least_error = error_of(codes_up_to(float(most)), scale, minimum)
    for number in range(num_steps + 1):
        codes = codes_up_to(most + first + step * number)
        of_codes = weights * codes
        sum_l, sum_ll, sum_lx = of_codes.sum(dim=-1), (of_codes * codes).sum(dim=-1), (weighted * codes).sum(dim=-1)
        both = sum_w * sum_ll - sum_l * sum_l
        fit = _quotients(sum_w * sum_lx - sum_x * sum_l, both)
        shift = _quotients(sum_l * sum_lx - sum_ll * sum_x, both)
        fit = torch.where(shift < 0, _quotients(sum_lx, sum_ll), fit)  # the best scale without a minimum
        shift = shift.clamp_(min=0)
        error = error_of(codes, fit, shift)  # not from the sums: of equal codes those are all rounding
        better = (error < least_error) & (both > 0) & (fit >= 0)
        least_error = torch.where(better, error, least_error)
        scale, minimum = torch.where(better, fit, scale), torch.where(better, shift, minimum)
    return scale, minimum


def _symmetric_scales(groups: Tensor, *, most: int) -> Tensor:
    """Return the scale, of either sign, of each group of ``groups`` [..., size]; codes are from -most to most - 1."""
    largest = groups.gather(-1, groups.abs().argmax(dim=-1, keepdim=True))  # with its sign
    inverse = _quotients(torch.full_like(largest, -1.0), largest)
    weighted = groups.square() * groups
    best_scale = torch.zeros_like(largest).squeeze(-1)
    best_gain = torch.zeros_like(best_scale)
    for number in range(-9, 10):
        codes = (groups * ((most + 0.1 * number) * inverse)).round_().clamp_(-most, most - 1)
        sum_lx = (weighted * codes).sum(dim=-1)
        scale = _quotients(sum_lx, (groups * codes).square_().sum(dim=-1))
        gain = scale * sum_lx  # how much less the squared error is than without codes
        better = gain > best_gain
        best_gain, best_scale = torch.where(better, gain, best_gain), torch.where(better, scale, best_scale)
    return torch.where(largest.squeeze(-1).abs() < _TINY, 0.0, best_scale)


def _quotients(dividends: Tensor, divisors: Tensor) -> Tensor:
    """Return the quotients; 0 where the divisor is 0."""
    return torch.where(divisors == 0, 0.0, dividends / divisors)


def _nibbles(codes: Tensor) -> Tensor:
    """Join codes of 4 bits of two neighbouring groups, [num_blocks, 8, 32], in bytes [num_blocks, 128]."""
    return (codes[:, 0::2] | codes[:, 1::2] << 4).flatten(1)
