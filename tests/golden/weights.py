"""Weights that follow from a tensor's name alone, so that golden values need not store any.

Used by `make_golden.py` (under torch) and by the tests (without): only numpy here.
"""

import zlib
from collections.abc import Sequence

import numpy as np


def weight(key: str, shape: Sequence[int]) -> np.ndarray:
    """The float32 tensor of a Hugging Face key, e.g. `model.layers.0.self_attn.q_proj.weight`.

    The stream is that of `np.random.RandomState`, which numpy promises never to change, and takes
    nothing but integers and one multiplication: the same bits everywhere.

    The scales are such that no part can hide: norms spread around 1, biases as large as what they
    are added to, and queries and keys large enough that attention is far from uniform.
    """
    draws = np.random.RandomState(zlib.crc32(key.encode())).random_sample(tuple(shape)) * 2 - 1
    if key.endswith("norm.weight"):
        values = 1 + 0.4 * draws
    elif key.endswith(".bias"):
        values = 0.8 * draws
    elif key.endswith("embed_tokens.weight"):
        values = draws
    else:
        gain = 1.6 if "q_proj" in key or "k_proj" in key else 1.0
        values = draws * gain * (3 / shape[1]) ** 0.5  # a uniform draw has variance 1/3
    return values.astype(np.float32)


def token_ids(name: str, length: int, vocab_size: int) -> np.ndarray:
    """int32 [length]: random ids that follow from a name."""
    state = np.random.RandomState(zlib.crc32(name.encode()))
    return state.randint(0, vocab_size, length).astype(np.int32)
