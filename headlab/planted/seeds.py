"""Seeded randomness: one private stream per purpose, so that no draw moves another."""

from __future__ import annotations

import zlib

import numpy as np


def generator(seed: int, *purpose: object) -> np.random.Generator:
    """A generator that depends only on ``seed`` and its purpose; global ones stay untouched."""
    label = "/".join(str(part) for part in purpose)
    return np.random.default_rng([seed & 0xFFFFFFFFFFFFFFFF, zlib.crc32(label.encode())])
