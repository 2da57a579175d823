"""Bit widths of layers and samples where they lower the noise most, under a budget of bytes."""
