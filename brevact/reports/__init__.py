"""Measurements of the memory and the gradients of a model with backward quantization."""
