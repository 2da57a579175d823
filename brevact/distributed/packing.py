"""Pack gradients for other processes, in a size and format that all processes know.

A message has the buffers of packed tensors, each at a multiple of 16 bytes. Since backends crash or hang if messages
differ in length, processes compare digests of their settings and steps before the first one.
"""

from __future__ import annotations

import atexit
import hashlib
import re
import struct
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from brevact.arguments import check_model
from brevact.quantizers import (
    ActivationQuantizer,
    DualPrecisionQuantizer,
    MixingQuantizer,
    PackedActivation,
    PackedSpec,
    SampleQuantizer,
    UniformQuantizer,
    WeibullQuantizer,
)
from brevact.quantizers.brief import brief
from brevact.quantizers.checks import check_int
from brevact.quantizers.formats.sign_magnitude.quantizer import SignMagnitudeLevels

ALIGNMENT = 16
SEEDS = -(2**63), 2**63 - 1
"""The least and the largest seed."""


def message_of(packs: Sequence[PackedActivation]) -> Tensor:
    """Join packed tensors on one device into one message, (nbytes,) uint8."""
    return torch.cat([nn.functional.pad(packed.buffer, (0, -packed.spec.nbytes % ALIGNMENT)) for packed in packs])


def packs_of(message: Tensor, specs: Sequence[PackedSpec[Any]]) -> list[PackedActivation]:
    """Split any process's message into packed tensors of these specs, which share its memory."""
    parts = message.split([-(-spec.nbytes // ALIGNMENT) * ALIGNMENT for spec in specs])
    return [PackedActivation(spec, part[: spec.nbytes]) for spec, part in zip(specs, parts, strict=True)]


def keep_for_this_stream(*tensors: Tensor) -> None:
    """Keep the memory of another stream's tensors until this stream's work is done."""
    for tensor in tensors:
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))


def digest_of(settings: Sequence[object]) -> Tensor:
    """Return (16,) uint8 of the settings' texts without addresses: users' quantizers may lack a ``__repr__``."""
    text = re.sub(r" at 0x[0-9a-fA-F]+", "", " ".join(map(str, settings)))
    digest = hashlib.blake2b(text.encode(), digest_size=ALIGNMENT).digest()
    return torch.frombuffer(bytearray(digest), dtype=torch.uint8)


def after(work: Any, finish: Callable[[], Tensor], is_cpu: bool) -> torch.futures.Future[Tensor]:
    """Run `finish`, without gradients, once a collective is done, and return the future of its result.

    On a device, it runs on the stream that waits for the collective. On the CPU, a separate thread waits and runs it:
    a callback on a thread of the process group (Gloo) could deadlock, since this thread needs the GIL to release the
    Python object, while a thread that destroys the group holds the GIL and waits for the group's threads.

    If the collective or the function raises, the future's `wait` raises a RuntimeError with the cause.
    """

    def finished(done: torch.futures.Future[Any]) -> Tensor:
        found = done.value()  # on a device, raises the collective's error; on the CPU, an error or None
        if isinstance(found, Exception):
            raise found
        with torch.no_grad():
            return finish()

    if not is_cpu:
        return work.get_future().then(finished)
    done: torch.futures.Future[Any] = torch.futures.Future()
    result = done.then(finished)

    def wait() -> None:
        error = None
        try:
            work.wait()
        except Exception as raised:
            error = raised
        done.set_result(error)

    thread = threading.Thread(target=wait, name="brevact collective", daemon=True)
    thread.start()
    _waiting.add(thread)
    return result


#: Seconds that a process waits at exit for collectives with a pending function.
PATIENCE = 1.0
_waiting: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


@atexit.register
def _finish() -> None:
    """Wait for running functions: a thread that returns to a finalized interpreter aborts the process."""
    deadline = time.monotonic() + PATIENCE
    for thread in list(_waiting):
        thread.join(max(0.0, deadline - time.monotonic()))


#: Packs a tensor losslessly into its own bytes.
AS_IT_IS = UniformQuantizer(bit_width=32)

_ALL_RANKS = -1
_UNBIASED = (UniformQuantizer, WeibullQuantizer, DualPrecisionQuantizer, SampleQuantizer, SignMagnitudeLevels)


def pack(quantizer: ActivationQuantizer, x: Tensor, place: tuple[int, int, int], rank: int) -> PackedActivation:
    """Pack a gradient with this rank's random bits, and in the size that all ranks use."""
    if isinstance(quantizer, MixingQuantizer):
        quantizer = quantizer.with_drawn_size(x.numel(), _seed(*place, _ALL_RANKS))
    return quantizer.quantize(x, _seed(*place, rank))


def is_unbiased(quantizer: ActivationQuantizer) -> bool:
    """Return whether a quantizer is lossless or rounds at random between levels that span a bucket."""
    if isinstance(quantizer, MixingQuantizer):
        return is_unbiased(quantizer.low) and is_unbiased(quantizer.high)
    if any(getattr(quantizer, name, False) for name in ("is_exact", "is_lossless", "keeps_elements")):
        return True
    return isinstance(quantizer, _UNBIASED) and quantizer.is_stochastic


def check_feedback(quantizer: ActivationQuantizer) -> None:
    """Raise a ValueError if a quantizer's error is not smaller than its input, measured on 4096 normal values."""
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0), device="cpu")
    if (pack(quantizer, x, (0, 0, 0), 0).dequantize() - x).norm() >= x.norm():
        raise ValueError(
            f"error_feedback: got True with {brief(quantizer)}, whose errors exceed the gradients: they would grow "
            "from step to step; accepted is a quantizer of smaller errors, StochBackward2bit, or error_feedback=False"
        )


def _seed(*parts: int) -> int:
    digest = hashlib.blake2b(struct.pack(f"<{len(parts)}q", *parts), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


class ParameterStates:
    """Parameters' numbers, in the order first seen, and rounding errors to feed back; in files by name."""

    def __init__(self) -> None:
        self.numbers: dict[Tensor, int] = {}
        self.residuals: dict[Tensor, Tensor] = {}

    def number_of(self, parameter: Tensor) -> int:
        if parameter not in self.numbers:
            self.numbers[parameter] = 1 + max(self.numbers.values(), default=-1)
        return self.numbers[parameter]

    def state_dict(self, model: nn.Module) -> dict[str, Any]:
        """Return "numbers" and copied "residuals" by name; raises a ValueError if the model has no known parameter."""
        known = {name: p for name, p in _named(model).items() if p in self.numbers}
        if self.numbers and not known:
            raise ValueError(
                f"model: got {brief(model)}, which has none of the parameters whose gradients were averaged; "
                "accepted is the model that DistributedDataParallel has, not a copy"
            )
        return {
            "numbers": {name: self.numbers[p] for name, p in known.items()},
            "residuals": {name: self.residuals[p].clone() for name, p in known.items() if p in self.residuals},
        }

    def load_state_dict(self, state: Mapping[str, Any], model: nn.Module) -> None:
        """Replace a model's states; raises a ValueError if it lacks parameters of the state, or shapes differ."""
        named = _named(model)
        residuals: dict[Tensor, Tensor] = {}
        for name in state["numbers"]:
            if name not in named:
                raise ValueError(f"state: has parameter {name!r}, which the model lacks; load it for the same model")
        for name, residual in state["residuals"].items():
            if name not in state["numbers"]:
                raise ValueError(f"state: {name!r} has a residual and no number; accepted is what state_dict returned")
            parameter = named[name]
            if residual.shape != parameter.shape:
                raise ValueError(
                    f"state: {name!r} has shape {tuple(residual.shape)} there and {tuple(parameter.shape)} in the "
                    "model; load it for the same model"
                )
            residuals[parameter] = residual.to(parameter.device, copy=True)
        for parameter in named.values():
            self.numbers.pop(parameter, None), self.residuals.pop(parameter, None)
        self.numbers |= {named[name]: number for name, number in state["numbers"].items()}
        self.residuals |= residuals


def check_state(state: Any) -> None:
    """Raise a ValueError unless this is a hook's state."""
    if not isinstance(state, Mapping):
        raise ValueError(f"state: got {brief(state)}; accepted is what state_dict(model) returned")
    if missing := {"step", "seed", "numbers", "residuals"} - set(state):
        raise ValueError(f"state: lacks {sorted(missing)}; accepted is what state_dict(model) returned")
    check_int("state['step']", state["step"], 0)
    check_int("state['seed']", state["seed"], *SEEDS)
    for key, kind in (("numbers", int), ("residuals", Tensor)):
        values = state[key].values() if isinstance(state[key], Mapping) else [state[key]]
        if not all(isinstance(value, kind) for value in values):
            raise ValueError(
                f"state: {key!r} is {brief(state[key])}; accepted is what state_dict(model) returned: names with "
                f"values of type {kind.__name__}"
            )


def _named(model: nn.Module) -> dict[str, nn.Parameter]:
    check_model(model)
    return dict((model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model).named_parameters())
