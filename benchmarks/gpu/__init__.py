"""Bandwidth of the kernels and memory and speed of training steps on a GPU: `python -m benchmarks.gpu`."""
