"""Bit widths per layer and sample that lower the noise most within a byte budget."""
