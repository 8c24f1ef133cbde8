"""Attention over tokens that stand in no order: what is left after eviction."""
