"""Llama-family models in JAX with sparse, compressed and tiered KV caches."""
