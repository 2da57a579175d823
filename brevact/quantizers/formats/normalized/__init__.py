"""Fixed levels of values that are normalized by their mean and deviation."""
