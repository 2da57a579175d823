"""Residuals of a rounding to integers, in a few bits."""
