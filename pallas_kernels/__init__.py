"""Attention kernels over plain arrays: no model, no cache class, no config of ours.

An op is a folder: `reference.py` (slow, obvious, float32: the oracle), `xla.py` (any back end),
`api.py` (validates once, picks an implementation).
"""

from pallas_kernels.decode.api import decode_attention
from pallas_kernels.pages import append_tokens, gather_tokens, new_pages
from pallas_kernels.prefill.api import prefill_attention
from pallas_kernels.prefill.reference import masked_attention as reference_attention
from pallas_kernels.types import AttentionOutput, merge_attention

__all__ = [
    "AttentionOutput",
    "append_tokens",
    "decode_attention",
    "gather_tokens",
    "merge_attention",
    "new_pages",
    "prefill_attention",
    "reference_attention",
]
