"""Functions of other libraries: packed by the table, with the gradients that they have, or as they are."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import brevact
from brevact import LosslessBackward, Policy, StochBackward2bit, StochBackward4bit, StochBackward8bit
from brevact.autograd import BackwardSettings, region
from brevact.autograd.interop import library_functions
from brevact.autograd.interop.library_functions import BY_MODULE, EXACT, GRADIENT, SCORES, SETS, SMOOTH
from brevact.autograd.interop.other_code import find, name_of, watch_forward
from tests.autograd.library_stand_ins import STAND_INS
from tests.autograd.measuring import Mirrored, watch_saved
from tests.autograd.sync_batch_norm import SavesStatistics
from tests.libraries import run_interpreted

MASK = torch.rand(64, 128, generator=torch.Generator().manual_seed(2)) > 0.1
#: Functions that are there on a CPU, as functions of one tensor.
CALLS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "torch.nn.modules._functions.SyncBatchNorm": lambda function, x: SavesStatistics.apply(
        x, torch.ones(x.shape[1], dtype=x.dtype)
    ),
    "timm.layers.activations_me.SwishAutoFn": lambda function, x: function.apply(x),
    "timm.layers.activations_me.MishAutoFn": lambda function, x: function.apply(x),
    "transformers.models.bloom.modeling_bloom.GeLUFunction": lambda function, x: function.apply(x),
    "transformers.models.sew_d.modeling_sew_d.XSoftmax": lambda function, x: function.apply(x, MASK, -1),
    **{path: stand_in.call for path, stand_in in STAND_INS.items()},
}
every_stand_in = pytest.mark.parametrize("path", STAND_INS)
DRAWS = 64


@pytest.fixture(autouse=True)
def read(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Libraries count as read, in whatever version, installed or not."""
    monkeypatch.setattr(library_functions, "READ", {})
    for stand_in in STAND_INS.values():
        watch_forward(stand_in.function)
    yield
    for cached in (library_functions._letters_of, library_functions._is_read):
        cached.cache_clear()


def activation(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(64, 128, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()


def call_of(path: str) -> Callable[[Tensor], Tensor]:
    function: Any = STAND_INS[path].function if path in STAND_INS else None
    if function is None:
        pytest.importorskip(path.partition(".")[0])
        importlib.import_module(path.rpartition(".")[0])
        function = find(path)
    assert name_of(function) == path
    return lambda x: CALLS[path](function, x)


def gradient(call: Callable[[Tensor], Tensor], x: Tensor, policy: Any = None) -> tuple[Tensor, Tensor]:
    with brevact.backward_quant(policy):
        out = call(x * 1.0)
    scale = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(out.dtype)
    return out.detach(), torch.autograd.grad((out * scale).sum(), x)[0]


def mean_error(call: Callable[[Tensor], Tensor], bit_width: int) -> float:
    """Norm of the mean gradient's error over rounding errors of both signs: 0 if it is affine in the saved tensor."""
    x = activation(torch.float64)
    (_, expected), mean = gradient(call, x), 0.0
    for sign in (1, -1):
        torch.manual_seed(0)
        with region(BackwardSettings(Mirrored(sign, bit_width))):
            out = call(x * 1.0)
        scale = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        (grad,) = torch.autograd.grad((out * scale).sum(), x)
        assert not torch.equal(grad, expected)  # it is packed
        mean = mean + grad / 2
    return float((mean - expected).norm())


#: Bound of the mean error at 8 bits: below one of first order in the error at 4, 4 times that of second order.
SECOND_ORDER = 4 * (15 / 255) ** 2


@pytest.mark.parametrize("path", CALLS)
def test_biases_are_of_second_order(path):
    call = call_of(path)
    if not {GRADIENT, SCORES} & set(SETS[path][0]):  # of these, by 6 and 8 bits, not by the quantizer of the law
        assert mean_error(call, 8) <= SECOND_ORDER * mean_error(call, 4) + 1e-9
    if SETS[path][0] == SMOOTH:  # of few bits, a curve of its input is not packed
        with watch_saved() as saved, brevact.backward_quant(StochBackward2bit):
            call(activation() * 1.0)
        assert [t.dtype for t in saved.tensors] == [torch.float32]


@every_stand_in
def test_stand_ins_are_the_functions_that_they_stand_for(path):
    found, expected = (gradient(f, activation(torch.float64)) for f in (call_of(path), STAND_INS[path].plain))
    torch.testing.assert_close(found, expected)


def check_gradients(call: Callable[[Tensor], Tensor], draws: int = DRAWS) -> None:
    """Results and lossless gradients are equal bit for bit, others unbiased."""
    x = activation()
    out, expected = gradient(call, x)
    assert all(map(torch.equal, gradient(call, x, LosslessBackward), (out, expected)))
    found = [gradient(call, x, StochBackward4bit.let(min_numel=0)) for _ in range(draws)]
    assert all(torch.equal(each, out) for each, _ in found)
    errors = torch.stack([each - expected for _, each in found])
    along, variance = (errors * expected).sum((1, 2)), float(errors.square().sum((1, 2)).mean())
    assert variance > 0
    # A bias of second order is a curvature times the variance.
    assert abs(float(along.mean())) <= 5 * float(along.std()) / draws**0.5 + variance


@every_stand_in
def test_lossless_gradients_are_equal_and_others_unbiased(path):
    check_gradients(call_of(path))


@pytest.mark.skipif(sys.platform != "linux", reason="Triton is there on Linux alone")
@pytest.mark.exhaustive
def test_gradients_of_fla_are_equal_or_unbiased():
    pytest.importorskip("fla", reason="not installed: fla-core (pip install '.[test]')")
    run_interpreted("tests.autograd.interpreted_fla")


@every_stand_in
@pytest.mark.parametrize("by_rule", [False, True], ids=["table", "rule"])
def test_tensors_are_packed_by_their_letters(path, by_rule):
    call, quantizer = call_of(path), StochBackward4bit.let(min_numel=0)
    with watch_saved() as plain:
        call(activation() * 1.0)
    (letters,) = (each for each in SETS[path] if len(each) == len(SETS[path][0]))
    with (
        watch_saved() as saved,
        brevact.backward_quant(Policy({STAND_INS[path].function: quantizer}) if by_rule else quantizer),
    ):
        call(activation() * 1.0)
    count = len(letters) - 2 * path.endswith("CrossEntropyFunction")  # without None
    for letter, x, stored in zip(letters, plain.tensors[-count:], saved.tensors[-count:], strict=False):
        if letter == EXACT:
            assert stored is x or torch.equal(stored, x)
        else:
            bits = 8 * (stored.nbytes - 6 * -(-x.numel() // 512)) / x.numel()  # a bucket has a scale and a minimum
            assert stored.dtype is torch.uint8 and bits <= {SCORES: 8, GRADIENT: 6}.get(letter, 4)


#: Liger's losses of parts of a batch, which run on a CPU: a module's arguments, from hidden states, a head and tokens.
LOSSES: dict[str, Callable[[Tensor, Tensor, Tensor], tuple[Any, ...]]] = {
    "cpo_loss.CPO": lambda x, head, ids: (head, x, ids),
    "dpo_loss.DPO": lambda x, head, ids: (head, x, ids, None, x.detach() + 1, head.detach()),
    "orpo_loss.ORPO": lambda x, head, ids: (head, x, ids),
    "simpo_loss.SimPO": lambda x, head, ids: (head, x, ids),
    "kto_loss.KTO": lambda x, head, ids: (x, head, ids, None, ids[:, 0] > 64, x.detach() + 1, head.detach()),
    "jsd_loss.JSD": lambda x, head, ids: (
        x.flatten(0, 1),
        head,
        x.detach().flatten(0, 1) + 1,
        head.detach(),
        ids.flatten(),
    ),
    "cosine_similarity_loss.CosineSimilarity": lambda x, head, ids: LOSSES["jsd_loss.JSD"](x, head, ids),
    "grpo_loss.GRPO": lambda x, head, ids: (
        (x, head, ids, torch.ones_like(ids), ids[:, 0] / 64 - 1, *([None] * 3), x.detach() + 1, head.detach())
    ),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_of_liger_save_their_gradients_packed(name):
    """Unbiased, at 6 bits; plain and lossless ones are equal bit for bit."""
    pytest.importorskip("liger_kernel", reason="not installed: liger-kernel (pip install '.[test]')")
    module, _, kind = name.partition(".")
    imported = importlib.import_module(f"liger_kernel.chunked_loss.{module}")
    loss = getattr(imported, f"LigerFusedLinear{kind}Loss")(compiled=False)
    made = torch.Generator().manual_seed(0)
    x, weight = torch.randn(4, 16, 128, generator=made), torch.randn(128, 128, generator=made) / 128
    ids = torch.randint(128, (4, 16), generator=made)

    class Head(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(weight)

        def forward(self, x: Tensor) -> Tensor:
            out = loss(*LOSSES[name](x, self.weight, ids))
            return out[0] if isinstance(out, tuple) else out

    def step(policy: Any) -> tuple[Tensor, Tensor]:
        head, given = Head(), x.clone().requires_grad_()
        out = head(given) if policy is None else brevact.quantize_backward(head, policy)(given)
        return out.detach(), torch.cat([grad.flatten() for grad in torch.autograd.grad(3 * out, (given, head.weight))])

    out, expected = step(None)
    assert all(map(torch.equal, step(LosslessBackward), (out, expected)))
    found = [step(StochBackward4bit) for _ in range(DRAWS // 2)]
    assert all(torch.equal(each, out) for each, _ in found)
    packed = brevact.quantize_backward(Head(), StochBackward4bit)
    report = brevact.memory_report(packed, x.clone().requires_grad_(), lambda head, x: head(x))
    kept = sum(row.saved_bytes for row in report.ops if row.op.startswith("Liger"))
    assert 0 < kept <= (x.numel() + weight.numel()) * (6 / 8 + 6 / 512), report
    errors = torch.stack([each - expected for _, each in found])
    along = errors @ expected
    assert 0 < float(errors.norm(dim=1).mean()) < 0.1 * float(expected.norm())
    assert abs(float(along.mean())) <= 5 * float(along.std()) / len(found) ** 0.5


def test_results_derive_from_what_norms_and_gates_save():
    """A layer behind one packs nothing, and its weight has the gradient of decoded values."""
    for path in library_functions.FORMULAS.keys() & STAND_INS.keys():
        call = call_of(path)
        weight = torch.randn(8, 128, requires_grad=True)
        with watch_saved() as alone, brevact.backward_quant(StochBackward8bit.let(min_numel=0)):
            call(activation() * 1.0)
        with watch_saved() as saved, brevact.backward_quant(StochBackward8bit.let(min_numel=0)):
            out = F.linear(call(activation() * 1.0), weight)
        codes = [
            sum({t.data_ptr(): t.nbytes for t in each.tensors if t.dtype is torch.uint8}.values())
            for each in (alone, saved)
        ]
        assert codes[0] == codes[1], path
        (found,) = torch.autograd.grad(out.sum(), weight)
        expected = call(activation()).detach().sum(0).expand(8, 128)
        assert 0 < float((found - expected).norm()) < 0.1 * float(expected.norm())


@pytest.mark.parametrize("distribution", ["torch", "no-such-library"])
def test_versions_that_nobody_has_read_stay_as_they_are(distribution, monkeypatch):
    monkeypatch.setattr(library_functions, "READ", {"liger_kernel": (distribution, (0, 1), (0, 8))})
    version = "2[.]" if distribution == "torch" else "of unknown version"
    match = rf"{distribution} {version}.*: 0[.]1 to 0[.]8 was read"
    with pytest.warns(UserWarning, match=match) as told, watch_saved() as saved:
        for _ in range(2):
            with brevact.backward_quant(StochBackward4bit.let(min_numel=0)):
                call_of(next(iter(STAND_INS)))(activation() * 1.0)
    assert len(told) == 1 and all(t.dtype is torch.float32 for t in saved.tensors)


@pytest.mark.parametrize("count, inverts", [(4, False), (3, True)], ids=["number", "result of a norm"])
def test_another_way_of_saving_stays_as_it_is(count, inverts, recwarn):
    path = next(iter(STAND_INS))

    class More(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.memory_efficient = inverts
            ctx.save_for_backward(*[x] * count)
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * 2

    More.__module__, _, More.__qualname__ = path.rpartition(".")
    watch_forward(More)
    with watch_saved() as saved, brevact.backward_quant(StochBackward4bit.let(min_numel=0)):
        More.apply(activation() * 1.0)
    assert all(t.dtype is torch.float32 for t in saved.tensors)
    told = [str(each.message) for each in recwarn]
    assert inverts or any("saves 4 tensors, 3 or 2 where it was read" in each for each in told)


def test_a_subclass_with_its_own_backward_is_not_in_the_table():
    class Equal(STAND_INS["liger_kernel.ops.swiglu.LigerSiLUMulFunction"].function):
        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
            a, b = ctx.saved_tensors
            return grad * (a == b), None

    with brevact.backward_quant(StochBackward4bit.let(min_numel=0)):
        x = activation()
        y = x * 1.0
        out = Equal.apply(y, y.detach())
    assert torch.equal(torch.autograd.grad(out.sum(), x)[0], torch.ones(64, 128))


def test_a_rule_for_a_function_that_saves_nothing_to_pack_is_refused():
    path = next(path for path, sets in SETS.items() if sets == ["---"])

    class Exact(torch.autograd.Function):
        pass

    Exact.__module__, _, Exact.__qualname__ = path.rpartition(".")
    with pytest.raises(TypeError, match="no quantizer changes what this function stores"):
        Policy({Exact: StochBackward4bit})


@pytest.mark.parametrize("module", [each for each in BY_MODULE if each.startswith("liger_kernel.")])
def test_names_are_those_of_the_installed_library(module):
    pytest.importorskip("liger_kernel", reason="not installed: liger-kernel (pip install '.[test]')")
    try:
        imported = importlib.import_module(module)
    except ImportError as error:
        pytest.skip(str(error))
    assert all(issubclass(getattr(imported, name), torch.autograd.Function) for name in BY_MODULE[module])
