"""The passes on CPU tensors, compiled by Numba: the bytes of the laws in plain torch. `launch` has them."""

import numba

if numba.config.DISABLE_JIT:
    raise ImportError("Numba's compiler is disabled (NUMBA_DISABLE_JIT), and the kernels run compiled only")
