"""DeltaKV as a cache method for sparse_jax. Its contents arrive with the DeltaKV issue."""
