"""CityHash64, as of its version 1.0: how CatBoost numbers categories of text.

Source: Pike and Alakuijala, CityHash, 2011. Version 1.1 hashes short texts otherwise, so its packages are of no use.
Plain Python integers, cut to 64 bits after each operation that can grow: a column has few distinct categories.
"""

from __future__ import annotations

_WORD = (1 << 64) - 1
_K0, _K1, _K2, _K3 = 0xC3A5C85C97CB3127, 0xB492B66FBE98F273, 0x9AE16A3B2F90404F, 0xC949D7C7509E6557
_PAIR = 0x9DDFEA08EB382D69
_BLOCK = 64  # bytes

Pair = tuple[int, int]


def city_hash_64(text: bytes) -> int:
    """Return the hash of a text, 0 to 2**64 - 1.

    Example:
        >>> city_hash_64(b"") == 0x9AE16A3B2F90404F
        True
    """
    if len(text) <= 16:
        return _of_16(text)
    if len(text) <= 32:
        return _of_32(text)
    return _of_64(text) if len(text) <= _BLOCK else _of_blocks(text)


def _word(text: bytes, index: int, size: int = 8) -> int:
    """Read a little-endian number at ``index``, from the end if negative."""
    start = index % len(text)
    return int.from_bytes(text[start : start + size], "little")


def _rotated(value: int, shift: int) -> int:
    value &= _WORD
    return (value >> shift | value << (64 - shift)) & _WORD


def _mixed(value: int) -> int:
    value &= _WORD
    return value ^ value >> 47


def _of_pair(low: int, high: int) -> int:
    inner = _mixed(((low ^ high) & _WORD) * _PAIR)
    return _mixed((high & _WORD ^ inner) * _PAIR) * _PAIR & _WORD


def _of_16(text: bytes) -> int:
    size = len(text)
    if size > 8:
        first, last = _word(text, 0), _word(text, -8)
        return _of_pair(first, _rotated(last + size, size)) ^ last
    if size >= 4:
        return _of_pair(size + (_word(text, 0, 4) << 3), _word(text, -4, 4))
    if size:
        low, high = text[0] + (text[size >> 1] << 8), size + (text[-1] << 2)
        return _mixed(low * _K2 ^ high * _K3) * _K2 & _WORD
    return _K2


def _of_32(text: bytes) -> int:
    first, second = _word(text, 0) * _K1 & _WORD, _word(text, 8)
    third, fourth = _word(text, -8) * _K2 & _WORD, _word(text, -16) * _K0 & _WORD
    low = _rotated(first - second, 43) + _rotated(third, 30) + fourth
    return _of_pair(low, first + _rotated(second ^ _K3, 20) - third + len(text))


def _of_64(text: bytes) -> int:
    def half(start: int, end: int, head: int, tail: int) -> Pair:
        """Return two sums over 32 bytes that begin with the word ``head`` and end with ``tail``."""
        total = head
        mixed, rotated = _rotated(total + tail, 52), _rotated(total, 37)
        total += _word(text, start + 8)
        rotated += _rotated(total, 7)
        total += _word(text, end)
        return total + tail, mixed + _rotated(total, 31) + rotated

    head = _word(text, 0) + (len(text) + _word(text, -16)) * _K0
    low, low_mixed = half(0, 16, head, _word(text, 24))
    high, high_mixed = half(-32, -16, _word(text, 16) + _word(text, -32), _word(text, -8))
    joined = _mixed((low + high_mixed) * _K2 + (high + low_mixed) * _K0)
    return _mixed(joined * _K0 + low_mixed) * _K2 & _WORD


def _of_blocks(text: bytes) -> int:
    size = len(text)
    x, y, z = _word(text, 0), _word(text, -16) ^ _K1, _word(text, -56) ^ _K0
    v, w = _of_32_seeded(text, size - 64, size, y), _of_32_seeded(text, size - 32, size * _K1, _K0)
    z += _mixed(v[1]) * _K1
    x = _rotated(z + x, 39) * _K1
    y = _rotated(y, 33) * _K1
    for start in range(0, (size - 1) // _BLOCK * _BLOCK, _BLOCK):
        x = _rotated(x + y + v[0] + _word(text, start + 16), 37) * _K1 & _WORD
        y = _rotated(y + v[1] + _word(text, start + 48), 42) * _K1 & _WORD
        x, y, z = x ^ w[1], y ^ v[0], _rotated(z ^ w[0], 33)
        v = _of_32_seeded(text, start, v[1] * _K1, x + w[0])
        w = _of_32_seeded(text, start + 32, z + w[1], y)
        x, z = z, x
    return _of_pair(_of_pair(v[0], w[0]) + _mixed(y) * _K1 + z, _of_pair(v[1], w[1]) + x)


def _of_32_seeded(text: bytes, start: int, first: int, second: int) -> Pair:
    """Mix 32 bytes and two seeds into a pair of numbers."""
    words = [_word(text, start + offset) for offset in (0, 8, 16, 24)]
    seeded = first + words[0]
    total = seeded + words[1] + words[2]
    rotated = _rotated(second + seeded + words[3], 21) + _rotated(total, 44)
    return (total + words[3]) & _WORD, (rotated + seeded) & _WORD
