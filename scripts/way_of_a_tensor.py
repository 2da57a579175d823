"""The way of a tensor: through which files a convolution's input becomes bytes, and comes back; drawn from a run.

    python -m scripts.way_of_a_tensor        # writes docs/way.svg, the picture in CONTRIBUTING.md

The files are those on the call stack when the kernel starts, torch's own left out.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any
from xml.sax.saxutils import escape

import torch
from torch import nn

import brevact

PACKAGE = Path(brevact.__file__).parent
PICTURE = PACKAGE.parent / "docs" / "way.svg"
#: What each file on the way does, in a few words.
ROLES = {
    "autograd/mode.py": "a region sees every torch function",
    "autograd/ops/__init__.py": "calls the counterpart in its row",
    "autograd/ops/convolution.py": "the op family: runs torch's own layer",
    "autograd/saved_tensor_hooks.py": "takes what torch's own layer saves",
    "autograd/decoders.py": "each way of keeping knows its way back",
    "autograd/store.py": "known already? shared? else packed",
    "quantizers/packed.py": "bytes with their format and layout",
    "quantizers/quantizer.py": "checks, seed and memory, of all formats",
    "quantizers/formats/uniform/quantizer.py": "the format: names the pass",
    "quantizers/backends.py": "kernels, or the law in passes.py",
    "cpu_kernels/quantize.py": "the compiled kernel, and what starts it",
    "cpu_kernels/dequantize.py": "the compiled kernel, and what starts it",
    "cpu_kernels/teams.py": "shares it among PyTorch's threads",
}


def ways() -> tuple[list[str], list[str]]:
    """Files on the way of a tensor that nothing is known of to its bytes, and on the way back.

    Returns:
        Their paths in the package, outermost first: of the forward pass, and of the backward pass.
    """
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 1))
    brevact.quantize_backward(model, brevact.StochBackward4bit)
    x = torch.randn(4, 3, 32, 32)
    model(x).sum().backward()  # kernels are compiled
    forward, y = _stack_of_kernel(lambda: model(x))
    backward, _ = _stack_of_kernel(y.sum().backward)
    return forward, backward


def _stack_of_kernel(run: Any) -> tuple[list[str], Any]:
    """The files of this package on the stack when the last kernel starts, and what `run` returns."""
    found: list[str] = []

    def watch(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_name == "share" and frame.f_code.co_filename.endswith("teams.py"):
            paths, outer = [frame.f_locals["kernel"].__wrapped__.__code__.co_filename], frame
            while outer is not None:
                paths.append(outer.f_code.co_filename)
                outer = outer.f_back  # type: ignore[assignment]
            inside = [Path(path) for path in reversed(paths) if Path(path).is_relative_to(PACKAGE)]
            found[:] = dict.fromkeys(path.relative_to(PACKAGE).as_posix() for path in inside)

    sys.setprofile(watch)
    try:
        result = run()
    finally:
        sys.setprofile(None)
    return found, result


def picture(forward: list[str], backward: list[str]) -> str:
    """An SVG of both ways, side by side.

    Args:
        forward: files from the call to the bytes.
        backward: files from what torch asks for to the tensor.
    """
    width, height = 330, 46
    rows = max(len(forward), len(backward)) + 1
    size = f"{2 * width + 60} {rows * (height + 14) + 40}"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" font-family="Helvetica, Arial, sans-serif" '
        'font-size="13" role="img" aria-labelledby="title">',
        '  <title id="title">Files on the way of a tensor from a convolution to its bytes, and back.</title>',
        f'  <rect width="{size.split()[0]}" height="{size.split()[1]}" fill="#ffffff"/>',
        '  <defs><marker id="a" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0L10 5L0 10z" fill="#555"/></marker></defs>',
    ]
    ends = (("forward: torch.conv2d(x, weight)", "bytes"), ("backward: torch asks for x", "x again, for its gradient"))
    for column, (files, (start, end)) in enumerate(zip((forward, backward), ends, strict=True)):
        left = 20 + column * (width + 20)
        lines.append(f'  <text x="{left}" y="24" font-weight="bold" fill="#1a237e">{escape(start)}</text>')
        for row, name in enumerate(files):
            top = 40 + row * (height + 14)
            lines += _box(left, top, width, height, name, ROLES[name])
            lines.append(
                f'  <path d="M{left + width // 2} {top + height}v13" stroke="#555" stroke-width="1.5" '
                'marker-end="url(#a)"/>'
            )
        top = 40 + len(files) * (height + 14) + 18
        lines.append(f'  <text x="{left + width // 2}" y="{top}" text-anchor="middle">{escape(end)}</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


def _box(left: int, top: int, width: int, height: int, name: str, role: str) -> list[str]:
    return [
        f'  <rect x="{left}" y="{top}" width="{width}" height="{height}" rx="6" fill="#e8eaf6" stroke="#3f51b5"/>',
        f'  <text x="{left + 10}" y="{top + 19}" font-weight="bold" fill="#1a237e">{escape(name)}</text>',
        f'  <text x="{left + 10}" y="{top + 37}" fill="#333">{escape(role)}</text>',
    ]


def main() -> None:
    """Write the picture."""
    PICTURE.write_text(picture(*ways()), encoding="utf-8")


if __name__ == "__main__":
    main()
