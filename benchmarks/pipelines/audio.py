"""Speech: crop four seconds, change loudness, add noise, and take the logarithmic mel spectrogram."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

BATCH_SIZE = 32
HAS_FIXED_SHAPES = True
RATE_HZ = 16_000
CROP = 4 * RATE_HZ
WINDOW, HOP, NUM_FFT, NUM_MELS = 400, 160, 512, 80
NUM_RECORDINGS = 48
collate = None


class Recordings(torch.utils.data.Dataset):
    """Samples are ``(80, 398)`` float32 and a label."""

    def __init__(self, length: int) -> None:
        self._length = length
        self._recordings = [synthesise(seed) for seed in range(NUM_RECORDINGS)]
        self._window = np.hanning(WINDOW).astype(np.float32)
        self._filters = mel_filters()

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        recording = self._recordings[index % NUM_RECORDINGS]
        begin = np.random.randint(0, len(recording) - CROP)
        wave = recording[begin : begin + CROP].astype(np.float32) * (np.random.uniform(0.5, 1.5) / 32768)
        wave += np.random.standard_normal(CROP).astype(np.float32) * 0.003
        frames = np.lib.stride_tricks.sliding_window_view(wave, WINDOW)[::HOP] * self._window
        power = np.abs(np.fft.rfft(frames, NUM_FFT)).astype(np.float32) ** 2
        mel = np.log(self._filters @ power.T + 1e-6)
        return torch.from_numpy(mel), index % 35


def synthesise(seed: int) -> np.ndarray:
    """Return eight seconds of a few gliding tones, int16."""
    generator = np.random.default_rng(seed)
    time_s = np.arange(8 * RATE_HZ) / RATE_HZ
    wave = np.zeros_like(time_s)
    for _ in range(5):
        pitch_hz, glide = generator.uniform(80, 3000), generator.uniform(-0.05, 0.05)
        wave += generator.uniform(0.05, 0.18) * np.sin(2 * np.pi * pitch_hz * time_s * (1 + glide * time_s))
    return (wave * 32767).astype(np.int16)


def mel_filters() -> np.ndarray:
    """Return triangular filters, ``(80, 257)`` float32, evenly spaced in mel = 2595 log10(1 + f / 700)."""
    top_mel = 2595 * np.log10(1 + RATE_HZ / 2 / 700)
    edges_hz = 700 * (10 ** (np.linspace(0, top_mel, NUM_MELS + 2) / 2595) - 1)
    bins_hz = np.linspace(0, RATE_HZ / 2, NUM_FFT // 2 + 1)
    rising = (bins_hz - edges_hz[:-2, None]) / (edges_hz[1:-1] - edges_hz[:-2])[:, None]
    falling = (edges_hz[2:, None] - bins_hz) / (edges_hz[2:] - edges_hz[1:-1])[:, None]
    return np.maximum(0, np.minimum(rising, falling)).astype(np.float32)


def build(length: int, root: str) -> Any:
    """Return the data set. ``root`` is not used."""
    return Recordings(length)
