"""Llama-family models in JAX with sparse, compressed and tiered KV caches.

Public names, each loaded when first used, so that importing one costs only what it needs.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sparse_jax.caches import (
        H2O,
        Cache,
        CacheMethod,
        Dense,
        Projections,
        PyramidKV,
        SnapKV,
        Span,
        Strided,
        Window,
        empty_cache,
        fork,
        truncate,
    )
    from sparse_jax.chat import encode_chat, encode_text, new_part
    from sparse_jax.config import ConfigError, ModelConfig, RopeConfig
    from sparse_jax.generation import (
        GenerateOutput,
        Timings,
        generate,
        generate_timed,
        stream,
    )
    from sparse_jax.inference import decode_step, finish_prefill, forward, prefill
    from sparse_jax.loading import Model, export_hf, fetch_demo_model, load_model, save_model
    from sparse_jax.model import abstract_params, init_params
    from sparse_jax.prompts import pad_prompts
    from sparse_jax.sampling import SamplingParams

_MODULES = {
    "caches": "Cache CacheMethod Dense H2O Projections PyramidKV SnapKV Span Strided Window "
    "empty_cache fork truncate",
    "chat": "encode_chat encode_text new_part",
    "config": "ConfigError ModelConfig RopeConfig",
    "generation": "GenerateOutput Timings generate generate_timed stream",
    "inference": "decode_step finish_prefill forward prefill",
    "loading": "Model export_hf fetch_demo_model load_model save_model",
    "model": "abstract_params init_params",
    "prompts": "pad_prompts",
    "sampling": "SamplingParams",
}
_HOME = {name: module for module, names in _MODULES.items() for name in names.split()}

__all__ = [
    "Cache",
    "CacheMethod",
    "ConfigError",
    "Dense",
    "GenerateOutput",
    "H2O",
    "Model",
    "ModelConfig",
    "Projections",
    "PyramidKV",
    "RopeConfig",
    "SamplingParams",
    "SnapKV",
    "Span",
    "Strided",
    "Timings",
    "Window",
    "abstract_params",
    "decode_step",
    "empty_cache",
    "encode_chat",
    "encode_text",
    "export_hf",
    "fetch_demo_model",
    "finish_prefill",
    "fork",
    "forward",
    "generate",
    "generate_timed",
    "init_params",
    "load_model",
    "new_part",
    "pad_prompts",
    "prefill",
    "save_model",
    "stream",
    "truncate",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
