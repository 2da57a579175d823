"""Levels of least variance for long-tailed values."""
