"""Attention kernels over plain arrays. Their contents arrive with the kernels issue."""
