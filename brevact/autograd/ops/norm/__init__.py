"""Norms: formulas on numbers, Functions that save their normalized input, calls of torch, and norms written out."""
