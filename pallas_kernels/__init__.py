"""Attention kernels over plain arrays: no model, no cache class, no config of ours.

An op is a folder: `reference.py` (slow, obvious, float32: the oracle), `xla.py` (any back end),
`mosaic*.py` (Pallas Mosaic GPU), `api.py` (validates once, picks an implementation).
"""

from pallas_kernels.decode.api import decode_attention
from pallas_kernels.masked import masked_attention as reference_attention
from pallas_kernels.pages import (
    append_tokens,
    gather_tokens,
    new_pages,
    read_slots,
    write_slots,
)
from pallas_kernels.patterns import Pattern
from pallas_kernels.prefill.api import prefill_attention
from pallas_kernels.quant.api import dequantize, quantize
from pallas_kernels.quant.pages import QuantizedPages
from pallas_kernels.slots.api import attention_mass, slot_attention
from pallas_kernels.topk.api import page_scores, token_scores, top_k
from pallas_kernels.topk.summaries import new_summaries, summarize_pages, update_summaries
from pallas_kernels.types import AttentionOutput, merge_attention

__all__ = [
    "AttentionOutput",
    "Pattern",
    "QuantizedPages",
    "append_tokens",
    "attention_mass",
    "decode_attention",
    "dequantize",
    "gather_tokens",
    "merge_attention",
    "new_pages",
    "new_summaries",
    "page_scores",
    "prefill_attention",
    "quantize",
    "read_slots",
    "reference_attention",
    "slot_attention",
    "summarize_pages",
    "token_scores",
    "top_k",
    "update_summaries",
    "write_slots",
]
