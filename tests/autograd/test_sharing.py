"""The weak table that lets a tensor be packed once: its lookups, and that it keeps nothing alive."""

from __future__ import annotations

import functools
import gc
import os
import sys
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import brevact
from brevact import StochBackward2bit
from brevact.autograd import attach_region, region
from brevact.autograd.region.settings import BackwardSettings
from brevact.autograd.saving import store
from brevact.autograd.saving.storages import find_record, find_shared, referent, share_packed
from brevact.quantizers import Rounding, UniformQuantizer
from tests.autograd.measuring import settings, watch_saved


def test_slot_outlives_the_python_objects_of_its_tensor():
    kept = (torch.ones(3),)
    x = torch.randn(4, requires_grad=True).exp()
    share_packed(x.detach(), ("settings",), kept, "decoder")
    sine = x.sin()
    del x
    gc.collect()
    (found,), _ = find_shared(sine.grad_fn._saved_self, ("settings",))
    assert found is kept[0]


def test_slot_finds_views_with_their_shape_strides_and_offset():
    """Also when only an alias of the kept tensor lives on, as under checkpoint."""
    x = torch.randn(4)
    block = torch.arange(24)
    for make in (lambda: block[7], lambda: block[4:], lambda: block.view(4, 6).t(), lambda: block.view(2, 3, 4)[:, 1]):
        view = make()
        expected, alias = view.clone(), view.detach()
        share_packed(x, ("settings",), (view,), "decoder")
        del view
        (found,), _ = find_shared(x, ("settings",))
        assert torch.equal(found, expected) and found.stride() == alias.stride()


def test_fill_drops_dead_entries_of_a_storage_that_lives_on():
    buffer, alive = torch.zeros(100, 4), []
    for step in range(400):
        kept = (torch.ones(3),)
        share_packed(buffer.add_(1), ("settings",), kept, "decoder")
        share_packed(buffer[step % 100], ("settings",), kept, "decoder")
        if step < 20:
            alive.append(kept)
    assert len(find_record(buffer).packs) <= 2 * 2 * (len(alive) + 1)
    assert find_shared(buffer, ("settings",)) is not None


def test_quantize_on_backward_shares_a_tensor_whose_seed_is_a_view():
    """On a GPU seeds are 0-d views of a block that is drawn at once."""
    quantizer, save_mode = UniformQuantizer(bit_width=2), brevact.SaveMode.QUANTIZE_ON_BACKWARD
    settings = BackwardSettings(quantizer=quantizer, save_mode=save_mode)
    x, block = torch.randn(64), torch.arange(256)
    kept, decoder = store.pack(x.detach(), quantizer, save_mode, block[7])
    share_packed(x, settings.key, kept, decoder)
    found, found_decoder = find_shared(x, settings.key)
    assert torch.equal(found_decoder.decode(found), decoder.decode(kept))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_weak_storage_lets_memory_join_again():
    def resident() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")

    references, before = [], resident()
    for _ in range(200):
        references.append(weakref.ref(torch.ones(1 << 18).untyped_storage()))
    assert resident() - before < 100 << 20  # of 200 MB that were allocated and freed
    assert all(referent(reference) is None for reference in references)


@pytest.mark.parametrize("op", [nn.Linear(64, 8), torch.sin, torch.Tensor.sigmoid])
def test_a_small_view_does_not_hold_a_large_storage(op):
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.head = nn.Linear(64, 64), op if isinstance(op, nn.Module) else nn.Identity()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.tokens(x)[:, 0]
            return self.head(x) if isinstance(op, nn.Module) else op(x)

    model, x = Model(), torch.randn(8, 128, 64)
    attach_region(model, settings(min_numel=4096))
    with watch_saved() as saved:
        out = model(x)
    assert max(kept.untyped_storage().nbytes() for kept in saved.tensors) < x.nbytes / 4
    out.sum().backward()
    assert model.tokens.weight.grad.isfinite().all()


def products_of_parts(x: Tensor) -> Tensor:
    a, b, c, d = x.chunk(4, -1)
    return a * b + c * d + a * c + b * d + a * d + b * c


def neighbours(x: Tensor) -> Tensor:
    return torch.stack([x[:, t] * x[:, t + 1] for t in range(x.shape[1] - 1)])


def packed_lstm(x: Tensor, lstm: nn.LSTM) -> Tensor:
    sequences = nn.utils.rnn.pack_padded_sequence(x, torch.arange(len(x), len(x) - x.shape[1], -1))
    return lstm(sequences)[0].data


@pytest.mark.parametrize(
    ("function", "shape"),
    [
        (products_of_parts, (32, 128)),
        (neighbours, (8, 64, 32)),
        (functools.partial(packed_lstm, lstm=nn.LSTM(64, 64)), (64, 32, 64)),
    ],
    ids=["products", "neighbours", "lstm"],
)
def test_small_views_keep_no_more_than_torch(function, shape):
    x = torch.randn(shape, requires_grad=True)

    def step(chosen: BackwardSettings | None) -> tuple[int, Tensor]:
        with watch_saved() as saved, region(chosen):
            out = function(x * 1)
        return saved.nbytes, torch.autograd.grad(out.square().sum(), x)[0]

    (nbytes, grad), (plain, expected) = step(settings(min_numel=4096, bit_width=8)), step(None)
    assert nbytes <= plain and torch.equal(grad, expected)


class Shortcut(nn.Module):
    """``last`` reads the sum of the input of ``read`` and the norm of its output."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.norm, self.last = nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x + self.norm(self.read(x)))


@pytest.mark.parametrize(("width", "derives"), [(2, True), (4, True), (1, False)])
def test_a_sum_derives_from_what_is_packed_at_another_width(width: int, derives: bool):
    """As long as that width is no coarser than the reader's 2 bits."""
    model, x = Shortcut(), torch.randn(128, 64)
    bits = {"read": brevact.StochBackward2bit.let(bit_width=width), "*": brevact.StochBackward2bit}
    brevact.quantize_backward(model, bits)
    rows = {row.layer: row for row in brevact.memory_report(model, x.requires_grad_()).ops if row.layer == "last"}
    assert (rows["last"].how == "derived") == derives
    assert (rows["last"].saved_bytes == 0) == derives


class Flattened(nn.Module):
    """Two layers of a norm's output that is changed on the way; the second one reads a view of it."""

    def __init__(self, change) -> None:
        super().__init__()
        self.change = change
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.second, self.last = nn.Conv2d(8, 8, 3, padding=1), nn.Linear(8 * 16 * 16, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.change(self.norm(self.first(x)))
        return self.second(y).sum() + self.last(y.flatten(1)).sum()


CHANGES = {"masked_fill_": lambda y: y.masked_fill_(y.detach() > 1, 0.0), "exp_": torch.exp_}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_view_of_what_is_known_no_more_is_packed_once_with_it(change):
    model, x = Flattened(change), torch.randn(8, 3, 16, 16)
    with watch_saved() as saved, region(settings(4)):
        model(x)
    codes = {t.untyped_storage().data_ptr() for t in saved.tensors if t.dtype is torch.uint8 and t.numel() > x.numel()}
    assert len(codes) == 2  # the norm's input, and its output, changed, for both readers


def test_a_view_of_what_is_known_too_coarsely_is_packed_once_with_it():
    model = Flattened(lambda y: y)
    fine = brevact.StochBackward8bit
    coarse = {nn.BatchNorm2d: brevact.StochBackward2bit, "*": fine}
    x = torch.randn(8, 3, 16, 16)
    found = brevact.memory_report(brevact.quantize_backward(model, coarse), x).saved_bytes
    alone = brevact.memory_report(brevact.quantize_backward(Flattened(torch.clone), coarse), x).saved_bytes
    assert found <= alone


def test_conjugate_views_are_not_taken_for_each_other():
    z = torch.randn(64, 64, dtype=torch.cfloat)
    a, b = z.imag, z.conj().imag
    weights = [torch.randn(64, 64, requires_grad=True) for _ in range(2)]
    with region(settings(bit_width=8, rounding=Rounding.NEAREST)):
        out = F.linear(a, weights[0]).sum() + F.linear(b, weights[1]).sum()
    first, second = torch.autograd.grad(out, weights)
    step = (a.max() - a.min()) / 255
    assert (first + second).abs().max() <= 64 * step


def batch_codes(layer: nn.Module, x: Tensor) -> Tensor:
    with watch_saved() as saved:
        layer(x)
    (codes,) = (kept for kept in saved.tensors if kept.dtype is torch.uint8)
    return codes


def test_a_batch_is_packed_anew_in_each_step_whatever_still_keeps_the_last_codes():
    """Garbage of an earlier step may keep its codes until it is collected: a step's noise must not depend on that."""
    layer = brevact.quantize_backward(nn.Linear(64, 8), StochBackward2bit, min_numel=0)
    x = torch.randn(32, 64)
    torch.manual_seed(0)
    first = batch_codes(layer, x)
    second = batch_codes(layer, x)  # while the first are alive
    torch.manual_seed(0)
    again = batch_codes(layer, x).clone()
    del first
    gc.collect()
    alone = batch_codes(layer, x)
    assert not torch.equal(second, again) and torch.equal(second, alone)


def test_a_batch_is_packed_once_for_the_layers_of_a_model():
    model = brevact.quantize_backward(nn.ModuleList(nn.Linear(64, 8) for _ in range(3)), StochBackward2bit, min_numel=0)
    x = torch.randn(32, 64)
    with watch_saved() as saved, brevact.backward_quant(model):
        outs = [layer(x) for layer in model]
    assert len({kept.data_ptr() for kept in saved.tensors if kept.dtype is torch.uint8}) == 1 and outs


def test_nearest_codes_of_a_batch_serve_the_next_step():
    layer = brevact.quantize_backward(nn.Linear(64, 8), brevact.NearestBackward4bit, min_numel=0)
    x = torch.randn(32, 64)
    first, second = [batch_codes(layer, x) for _ in range(2)]
    assert first.data_ptr() == second.data_ptr()


def test_layers_with_quantizers_of_their_own_share_what_a_layer_returned():
    layers = [brevact.nn.QuantLinear(64, 64, act_quant=StochBackward2bit, act_min_numel=0) for _ in range(4)]
    x = torch.randn(32, 64)
    hidden = layers[0](x)
    with watch_saved() as saved:
        outs = [layer(hidden) for layer in layers[1:]]
    assert len({kept.data_ptr() for kept in saved.tensors if kept.dtype is torch.uint8}) == 1 and outs
