"""The passes on CPU tensors, compiled by Numba: the bytes of the laws in plain torch. `launch` has them."""
