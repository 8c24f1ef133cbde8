"""Reference decoders of GGUF's block formats, written from their definitions, one value at a time
where that is clearest, in float64. Products of a float16 and small integers are exact there, so
the decoders under test must give these values to the last bit of float32."""

import numpy as np
from gguf import GGMLQuantizationType as Type

# bytes of one block; values of one block
SIZES = {
    Type.Q4_0: (18, 32), Type.Q4_1: (20, 32), Type.Q5_0: (22, 32), Type.Q5_1: (24, 32),
    Type.Q8_0: (34, 32), Type.Q2_K: (84, 256), Type.Q3_K: (110, 256), Type.Q4_K: (144, 256),
    Type.Q5_K: (176, 256), Type.Q6_K: (210, 256),
}  # fmt: skip
# where a block holds its float16 scales
SCALES_AT = {
    Type.Q4_0: (0,), Type.Q4_1: (0, 2), Type.Q5_0: (0,), Type.Q5_1: (0, 2), Type.Q8_0: (0,),
    Type.Q2_K: (80, 82), Type.Q3_K: (108,), Type.Q4_K: (0, 2), Type.Q5_K: (0, 2),
    Type.Q6_K: (208,),
}  # fmt: skip


def random_blocks(kind: Type, count: int, seed: int = 0) -> np.ndarray:
    """uint8 [count, bytes]: any bits, with finite scales of either sign."""
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (count, SIZES[kind][0]), dtype=np.uint8)
    for at in SCALES_AT[kind]:
        scale = (rng.standard_normal(count) * 0.01).astype(np.float16)
        blocks[:, at : at + 2] = scale[:, None].view(np.uint8)
    return blocks


def decode(kind: Type, blocks: np.ndarray) -> np.ndarray:
    """float32 [count, values] of uint8 [count, bytes]."""
    return np.stack([_DECODERS[kind](block) for block in blocks]).astype(np.float32)


def _half(block: np.ndarray, at: int) -> float:
    return float(block[at : at + 2].copy().view(np.float16)[0])


def _nibbles(data: np.ndarray) -> np.ndarray:
    """All low nibbles, then all high ones."""
    return np.concatenate([data & 15, data >> 4]).astype(np.float64)


def _fifth_bits(block: np.ndarray, at: int) -> np.ndarray:
    word = int.from_bytes(block[at : at + 4].tobytes(), "little")
    return np.array([16 * (word >> i & 1) for i in range(32)], np.float64)


def _q4_0(b):
    return _half(b, 0) * (_nibbles(b[2:]) - 8)


def _q4_1(b):
    return _half(b, 0) * _nibbles(b[4:]) + _half(b, 2)


def _q5_0(b):
    return _half(b, 0) * (_nibbles(b[6:]) + _fifth_bits(b, 2) - 16)


def _q5_1(b):
    return _half(b, 0) * (_nibbles(b[8:]) + _fifth_bits(b, 4)) + _half(b, 2)


def _q8_0(b):
    return _half(b, 0) * b[2:].view(np.int8).astype(np.float64)


def _q2_k(b):
    """16 groups of 16: a nibble of scale and one of minimum each; 2 bits a value. Value n lies in
    half n // 128, and there in byte n % 32, bit pair n % 128 // 32."""
    scales, quants, d, low = b[:16], b[16:80], _half(b, 80), _half(b, 82)
    out = np.empty(256)
    for n in range(256):
        half, pair, byte = n // 128, n % 128 // 32, n % 32
        q = int(quants[32 * half + byte]) >> 2 * pair & 3
        scale = int(scales[n // 16])
        out[n] = d * (scale & 15) * q - low * (scale >> 4)
    return out


def _q3_k(b):
    """16 groups of 16 with signed 6-bit scales; low 2 bits as in Q2_K, the third in a mask of its
    own (bit n // 32 of byte n % 32), cleared meaning 4 less."""
    mask, quants, packed, d = b[:32], b[32:96], b[96:108], _half(b, 108)
    out = np.empty(256)
    for n in range(256):
        half, pair, byte = n // 128, n % 128 // 32, n % 32
        q = int(quants[32 * half + byte]) >> 2 * pair & 3
        q -= 0 if int(mask[byte]) >> n // 32 & 1 else 4
        g = n // 16
        low = int(packed[g % 8]) >> (4 if g >= 8 else 0) & 15
        high = int(packed[8 + g % 4]) >> 2 * (g // 4) & 3
        out[n] = d * (low + 16 * high - 32) * q
    return out


def _scale_and_minimum(packed: np.ndarray, g: int) -> tuple[int, int]:
    """6-bit scale and minimum of group g of 8, out of 12 bytes."""
    p = [int(x) for x in packed]
    if g < 4:
        return p[g] & 63, p[g + 4] & 63
    return p[g + 4] & 15 | p[g - 4] >> 6 << 4, p[g + 4] >> 4 | p[g] >> 6 << 4


def _q4_k(b):
    """8 groups of 32; groups 2i and 2i + 1 are the low and high nibbles of 32 bytes."""
    d, low, packed, quants = _half(b, 0), _half(b, 2), b[4:16], b[16:]
    out = np.empty(256)
    for n in range(256):
        g = n // 32
        q = int(quants[g // 2 * 32 + n % 32]) >> 4 * (g % 2) & 15
        scale, minimum = _scale_and_minimum(packed, g)
        out[n] = d * scale * q - low * minimum
    return out


def _q5_k(b):
    """Q4_K with a fifth bit: bit g of byte n % 32."""
    d, low, packed, fifth, quants = _half(b, 0), _half(b, 2), b[4:16], b[16:48], b[48:]
    out = np.empty(256)
    for n in range(256):
        g = n // 32
        q = int(quants[g // 2 * 32 + n % 32]) >> 4 * (g % 2) & 15
        q += 16 * (int(fifth[n % 32]) >> g & 1)
        scale, minimum = _scale_and_minimum(packed, g)
        out[n] = d * scale * q - low * minimum
    return out


def _q6_k(b):
    """16 groups of 16 with int8 scales; 4 low and 2 high bits a value, in two halves of 128."""
    low, high, scales, d = b[:128], b[128:192], b[192:208].view(np.int8), _half(b, 208)
    out = np.empty(256)
    for n in range(256):
        half, m = n // 128, n % 128
        nibble = int(low[64 * half + m % 64]) >> (4 if m >= 64 else 0) & 15
        two = int(high[32 * half + m % 32]) >> 2 * (m // 32) & 3
        out[n] = d * int(scales[n // 16]) * (nibble + 16 * two - 32)
    return out


_DECODERS = {
    Type.Q4_0: _q4_0, Type.Q4_1: _q4_1, Type.Q5_0: _q5_0, Type.Q5_1: _q5_1, Type.Q8_0: _q8_0,
    Type.Q2_K: _q2_k, Type.Q3_K: _q3_k, Type.Q4_K: _q4_k, Type.Q5_K: _q5_k, Type.Q6_K: _q6_k,
}  # fmt: skip
