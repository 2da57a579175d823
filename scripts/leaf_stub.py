"""The declarations of backward quantizers that type checkers and editors read: `brevact/quant.pyi`.

    python -m scripts.leaf_stub        # writes it, after a quantizer or a docstring has changed

Many of these classes are made in a loop, which only a running program sees.
"""

from __future__ import annotations

import inspect
import textwrap
from pathlib import Path

import brevact.quant
from brevact.policy.files import LEAVES

STUB = Path(brevact.quant.__file__).with_suffix(".pyi")
_HEAD = '''"""{doc}"""

# Written by `python -m scripts.leaf_stub`.

from brevact.injectors.fragments import BackwardQuantSolver as _BackwardQuantizer
'''


def stub() -> str:
    parts = [_HEAD.format(doc=brevact.quant.__doc__)]
    for name, leaf in LEAVES.items():
        first = leaf.__bases__[0].__name__
        base = first if first in LEAVES else "_BackwardQuantizer"
        doc = inspect.getdoc(leaf)
        text = f'"""{doc}\n"""' if "\n" in doc else f'"""{doc}"""'
        parts.append(f"class {name}({base}):\n{textwrap.indent(text, '    ')}\n")
    return "\n".join(parts)


def main() -> None:
    STUB.write_text(stub(), encoding="utf-8")


if __name__ == "__main__":
    main()
