"""Norms: formulas on numbers, Functions that save the normalized input, calls of torch, and norms written out."""
