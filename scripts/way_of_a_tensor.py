"""The way of a tensor: through which files a convolution's input becomes bytes, and comes back; counted in a run.

    python -m scripts.way_of_a_tensor        # prints the calls, and writes docs/way.svg, the picture in CONTRIBUTING.md

Every function of the package that is entered counts, also where it returns before the kernel starts;
comprehensions and generators count as part of their function. The way is those on the call stack when it starts.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from textwrap import wrap
from types import FrameType
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

import torch
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn import functional as F

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
    "quantizers/backends.py": "kernels, or the reference in kernel_ops.py",
    "cpu_kernels/quantize.py": "the compiled kernel, and what starts it",
    "cpu_kernels/dequantize.py": "the compiled kernel, and what starts it",
    "cpu_kernels/teams.py": "shares it among PyTorch's threads",
}


class Way(NamedTuple):
    """What a pass enters.

    Args:
        calls: file and qualified name of each function of the package, in order; a name as often as it is entered.
        stack: files on the call stack when the last kernel starts, outermost first.
    """

    calls: list[tuple[str, str]]
    stack: list[str]

    @property
    def files(self) -> list[str]:
        """The files of these functions, in the order in which they are entered first."""
        return list(dict.fromkeys(file for file, _ in self.calls))

    def __str__(self) -> str:
        """Counts of both."""
        return f"{len(self.calls):3} calls in {len(self.files):2} files"


#: Contexts around a call, and the call, of an activation and a weight.
Route = tuple[Callable[[], Any], Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]
ROUTES: dict[str, Route] = {
    "positional": (nullcontext, F.conv2d),
    "keywords": (nullcontext, lambda x, weight: F.conv2d(input=x, weight=weight)),
    "padding": (nullcontext, lambda x, weight: F.conv2d(x, weight, padding="same")),
    "identity hooks": (lambda: saved_tensors_hooks(lambda x: x, lambda x: x), F.conv2d),
    "save_on_cpu": (save_on_cpu, F.conv2d),
    "autocast": (lambda: torch.autocast("cpu", torch.bfloat16), F.conv2d),
}


def ways(route: str = "positional") -> tuple[Way, Way]:
    """What a convolution of a tensor enters of which nothing is known yet, once kernels are compiled.

    Args:
        route: a key of `ROUTES`.

    Returns:
        Of the forward pass and of the backward pass.
    """
    around, call = ROUTES[route]
    weight = torch.randn(8, 3, 1, 1, requires_grad=True)
    for _ in range(3):
        with around(), brevact.backward_quant(brevact.StochBackward4bit):
            for _ in range(3):  # the first call of a region draws seeds for many
                forward, y = _entered(functools.partial(call, torch.randn(4, 3, 32, 32), weight))
        backward, _ = _entered(y.float().sum().backward)
    return forward, backward


def _entered(run: Callable[[], Any]) -> tuple[Way, Any]:
    """What of this package `run` enters, and what it returns."""
    calls: list[tuple[str, str]] = []
    stack: list[str] = []

    def watch(frame: FrameType, event: str, _: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event != "call" or not path.is_relative_to(PACKAGE):
            return
        name = getattr(frame.f_code, "co_qualname", frame.f_code.co_name)  # of Python 3.11
        if not name.endswith(("<genexpr>", "<listcomp>", "<dictcomp>", "<setcomp>")):
            calls.append((path.relative_to(PACKAGE).as_posix(), name))
        if frame.f_code.co_name == "share" and path.name == "teams.py":
            stack[:] = _stack(frame)

    sys.setprofile(watch)
    try:
        result = run()
    finally:
        sys.setprofile(None)
    return Way(calls, stack), result


def _stack(frame: FrameType) -> list[str]:
    """Files of this package on the stack of the function that starts a kernel, and that of the kernel."""
    paths, outer = [frame.f_locals["kernel"].__wrapped__.__code__.co_filename], frame
    while outer is not None:
        paths.append(outer.f_code.co_filename)
        outer = outer.f_back  # type: ignore[assignment]
    inside = [Path(path) for path in reversed(paths) if Path(path).is_relative_to(PACKAGE)]
    return list(dict.fromkeys(path.relative_to(PACKAGE).as_posix() for path in inside))


def picture(forward: Way, backward: Way) -> str:
    """An SVG of both ways, side by side: the files on the stack, and those beside them.

    Args:
        forward: from the call to the bytes.
        backward: from what torch asks for to the tensor.
    """
    width, height = 330, 46
    beside = [[file for file in sorted(way.files) if file not in way.stack] for way in (forward, backward)]
    lists = [wrap(", ".join(files), 50, break_long_words=False) for files in beside]
    rows = max(len(forward.stack), len(backward.stack))
    bottom = 40 + rows * (height + 14) + 70 + 16 * max(map(len, lists))
    size = f"{2 * width + 60} {bottom}"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" font-family="Helvetica, Arial, sans-serif" '
        'font-size="13" role="img" aria-labelledby="title">',
        '  <title id="title">Files on the way of a tensor from a convolution to its bytes, and back.</title>',
        f'  <rect width="{size.split()[0]}" height="{size.split()[1]}" fill="#ffffff"/>',
        '  <defs><marker id="a" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0L10 5L0 10z" fill="#555"/></marker></defs>',
    ]
    ends = (("forward: torch.conv2d(x, weight)", "bytes"), ("backward: torch asks for x", "x again, for its gradient"))
    for column, (way, (start, end)) in enumerate(zip((forward, backward), ends, strict=True)):
        left = 20 + column * (width + 20)
        lines.append(f'  <text x="{left}" y="24" font-weight="bold" fill="#1a237e">{escape(start)}</text>')
        for row, name in enumerate(way.stack):
            top = 40 + row * (height + 14)
            lines += _box(left, top, width, height, name, ROLES[name])
            lines.append(
                f'  <path d="M{left + width // 2} {top + height}v13" stroke="#555" stroke-width="1.5" '
                'marker-end="url(#a)"/>'
            )
        top = 40 + len(way.stack) * (height + 14) + 18
        lines.append(f'  <text x="{left + width // 2}" y="{top}" text-anchor="middle">{escape(end)}</text>')
        top = 40 + rows * (height + 14) + 50
        said = [f"asked on the way, in {len(beside[column])} files more:", *lists[column]]
        lines += [
            f'  <text x="{left}" y="{top + 16 * row}" fill="#333">{escape(line)}</text>'
            for row, line in enumerate(said)
        ]
    return "\n".join([*lines, "</svg>"]) + "\n"


def _box(left: int, top: int, width: int, height: int, name: str, role: str) -> list[str]:
    return [
        f'  <rect x="{left}" y="{top}" width="{width}" height="{height}" rx="6" fill="#e8eaf6" stroke="#3f51b5"/>',
        f'  <text x="{left + 10}" y="{top + 19}" font-weight="bold" fill="#1a237e">{escape(name)}</text>',
        f'  <text x="{left + 10}" y="{top + 37}" fill="#333">{escape(role)}</text>',
    ]


def main() -> None:
    """Print what each route enters, and write the picture of the first."""
    for route in ROUTES:
        forward, backward = ways(route)
        print(f"{route:15} forward: {forward}, backward: {backward}")
    PICTURE.write_text(picture(*ways()), encoding="utf-8")


if __name__ == "__main__":
    main()
