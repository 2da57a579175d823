"""Tensors that backward computes from other saved forms: expressions, recomputed layers, norms, and the cache."""
