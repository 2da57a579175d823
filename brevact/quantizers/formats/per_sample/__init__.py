"""A bit width for each sample of a batch."""
