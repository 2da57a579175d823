"""Kernels for CPU tensors, compiled by Numba, with the bytes of the references in plain torch. `launch` has them."""
