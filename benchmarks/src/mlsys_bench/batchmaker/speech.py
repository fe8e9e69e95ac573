"""Speech-like sound for demonstrations and measurements: a voice of pulses through formants, in words with pauses."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

SAMPLE_RATE = 16_000
_VOWELS = ((730, 1090, 2440), (270, 2290, 3010), (300, 870, 2240), (530, 1840, 2480), (570, 840, 2410))  # Hz
_BANDWIDTHS = (80.0, 90.0, 120.0)  # Hz


def speech_like(seconds: float, *, seed: int = 0) -> NDArray[np.float32]:
    """Return a recording at 16 kHz, in -1 to 1: words of vowels and hisses with pauses, over a little noise.

    Args:
        seconds: its length.
        seed: of voice, words and noise.
    """
    rng = np.random.default_rng(seed)
    count = int(seconds * SAMPLE_RATE)
    sound = np.zeros(count)
    pitch = rng.uniform(95, 210)
    at = int(rng.uniform(0, 0.3) * SAMPLE_RATE)
    while at < count:
        for _ in range(int(rng.integers(2, 6))):  # syllables of a word
            if rng.random() < 0.4:
                at = _add(sound, at, _hiss(rng, rng.uniform(0.04, 0.09)))
            vowel = _VOWELS[int(rng.integers(len(_VOWELS)))]
            at = _add(sound, at, _vowel(rng, rng.uniform(0.1, 0.24), pitch * rng.uniform(0.85, 1.2), vowel))
        at += int(rng.uniform(0.1, 0.9) * SAMPLE_RATE)
    sound += 0.002 * rng.standard_normal(count)
    return np.clip(sound, -1, 1).astype(np.float32)


def _add(sound: NDArray[np.float64], at: int, part: NDArray[np.float64]) -> int:
    end = min(len(sound), at + len(part))
    if at < end:
        sound[at:end] += part[: end - at]
    return at + len(part)


def _vowel(rng: np.random.Generator, seconds: float, pitch: float, formants: tuple[float, ...]) -> NDArray[np.float64]:
    """Return a voiced sound: the harmonics of a gliding pitch, each as loud as the formants let it through."""
    count = int(seconds * SAMPLE_RATE)
    time = np.arange(count) / SAMPLE_RATE
    glide = pitch * (1 + 0.12 * np.sin(np.pi * time / seconds + rng.uniform(0, np.pi)))
    phase = 2 * np.pi * np.cumsum(glide * (1 + 0.01 * rng.standard_normal(count).cumsum() / 30)) / SAMPLE_RATE
    voice = np.zeros(count)
    for harmonic in range(1, int(3800 / pitch)):
        hertz = harmonic * pitch
        gain = sum(
            weight / np.hypot(1, (hertz - formant) / width)
            for formant, width, weight in zip(formants, _BANDWIDTHS, (1.0, 0.6, 0.3), strict=True)
        )
        voice += gain / harmonic**0.5 * np.sin(harmonic * phase + rng.uniform(0, 2 * np.pi))
    envelope = np.minimum(1, np.minimum(time, seconds - time) / 0.03)
    return 0.25 * envelope * voice / max(1e-9, float(np.abs(voice).max()))


def _hiss(rng: np.random.Generator, seconds: float) -> NDArray[np.float64]:
    """Return an unvoiced sound: noise without its low frequencies."""
    count = int(seconds * SAMPLE_RATE)
    noise = np.diff(rng.standard_normal(count + 1))
    return 0.03 * noise * np.hanning(count)
