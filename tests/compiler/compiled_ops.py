"""Calls of ops in compiled graphs, plain and in a region, of inputs that graphs save as they save activations."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

import brevact
from brevact.compiler import graphs
from brevact.compiler.nodes import packet_of
from tests.autograd.database_laws import Outcome, dense, finite_pairs, loss_of
from tests.autograd.measuring import watch_saved
from tests.autograd.op_database import Sample, Variant, run, samples, variants

DRAWS = 32
_pack = graphs.pack


@torch.library.custom_op("brevact_tests::activation", mutates_args=())
def activation(x: Tensor) -> Tensor:
    """A copy that no compiler computes again in backward."""
    return x.clone()


activation.register_fake(torch.empty_like)
activation.register_autograd(lambda ctx, grad: grad)


class Call:
    """A call of an op, compiled or eager, in a region with a quantizer, None for plain."""

    def __init__(self, variant: Variant, sample: Sample, quantizer: Any, *, compiles: bool = True) -> None:
        self.process, self.nbytes = sample.process, 0
        self.rows: list[graphs.Row] = []
        self.packets: set[Any] = set()  # that backward computes
        self.leaves, spec = tree_flatten((sample.args, sample.kwargs))
        is_input = [isinstance(x, Tensor) and x.is_floating_point() and x.requires_grad for x in self.leaves]
        self.is_input = is_input

        def call(leaves: list[Any]) -> Any:
            args, kwargs = tree_unflatten(
                [activation(x) if each else x for x, each in zip(leaves, is_input, strict=True)], spec
            )
            with nullcontext() if quantizer is None else brevact.backward_quant(quantizer, min_numel=0):
                return variant.call(*args, **kwargs)

        torch._dynamo.reset()
        self.call = torch.compile(call, backend="aot_eager") if compiles else call

    def __call__(self, seed: int = 0) -> Outcome:
        """Run it, and differentiate a weighted sum of its results."""
        leaves = [
            x.detach().clone().requires_grad_(each) if isinstance(x, Tensor) else x
            for x, each in zip(self.leaves, self.is_input, strict=True)
        ]
        inputs = [x for x, each in zip(leaves, self.is_input, strict=True) if each]
        torch.manual_seed(seed)
        with warnings.catch_warnings(), mock.patch.object(graphs, "pack", self._pack):
            warnings.simplefilter("ignore")
            with watch_saved() as saved:
                out = self.call(leaves)
            given = {x.untyped_storage().data_ptr() for x in leaves if isinstance(x, Tensor)}
            saved.tensors = [x for x in saved.tensors if x.untyped_storage().data_ptr() not in given]
            self.nbytes = saved.nbytes
            outputs = [x for x in tree_flatten(self.process(out))[0] if isinstance(x, Tensor)]
            loss = loss_of(outputs)
            grads = [] if loss is None else torch.autograd.grad(loss, inputs, allow_unused=True)
        scale = sum(x.numel() for x in outputs if x.requires_grad) ** 0.5
        return Outcome(
            [dense(x.detach()) for x in outputs], [None if x is None else dense(x.detach()) for x in grads], scale
        )

    def _pack(self, joint: graphs.JointGraph) -> Any:
        self.packets.update(map(packet_of, joint.nodes))
        saved, rows = _pack(joint)
        self.rows += rows
        return saved, rows


def sample_of(op: Any, dtype: torch.dtype = torch.float32) -> tuple[Variant, Sample] | None:
    """The largest sample of some that gives a gradient, in a dtype."""
    variant = variants(op)[0]
    found = (sample for sample in samples(op, most=6) if any(x.numel() for x in sample.tensors))

    def cast(x: Any) -> Any:
        return x.detach().to(dtype).requires_grad_(x.requires_grad) if _is_float(x) else x

    for sample in sorted(found, key=lambda sample: -sum(x.numel() for x in sample.tensors)):
        sample = Sample(*tree_map(cast, (sample.args, sample.kwargs)), sample.process)
        try:
            if run(variant, sample, "activation", None).grads:
                return variant, sample
        except (RuntimeError, TypeError, ValueError, IndexError):  # the op has no such variant for this sample
            continue
    return None


def _is_float(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dtype is torch.float32


def errors_of_mean(call: Call, plain: Outcome, draws: int = DRAWS) -> list[tuple[float, float]]:
    """Error of each gradient's mean over draws and its standard error, relative to the gradient's norm."""
    drawn = [finite_pairs(call(seed), plain) for seed in range(draws)]
    found = []
    for place, (_, expected) in enumerate(drawn[0]):
        values = torch.stack([pairs[place][0] for pairs in drawn])
        norm = max(float(expected.norm()), 1e-5 * plain.scale, 1e-30)
        found.append(
            (float((values.mean(0) - expected).norm()) / norm, float(values.std(0).norm()) / draws**0.5 / norm)
        )
    return found
