"""The backward quantizers of all formats, like `brevitas.quant` for Brevitas.

    from brevact.quant import StochBackward2bit, WeibullBackward3bit

`brevact` exports each of them, too, and lists those that lead the documentation.
"""

# `python -m scripts.leaf_stub` declares all in quant.pyi.
from brevact.injectors.formats import *
