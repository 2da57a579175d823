"""Evenly spaced levels between the minimum and the maximum of each group."""
