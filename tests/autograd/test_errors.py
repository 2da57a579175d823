"""Wrong arguments get torch's own error; graphs that run twice, and second derivatives, which the error names."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from brevact.autograd import SaveMode, region
from tests.autograd.exactness import assert_same_error
from tests.autograd.measuring import settings

attend = F.scaled_dot_product_attention
LABELS = torch.zeros(9, dtype=torch.int64)
INDEX = torch.arange(2 * 3 * 10 * 5).view(2, 3, 10, 5) % 9
#: Wrong calls, by the sizes of the tensors that they take.
CALLS = {
    ((3, 4, 12, 12),): [
        lambda x: F.conv2d(x, torch.randn(2, 5, 3, 3)),
        lambda x: F.conv2d(x, torch.randn(2, 4, 3, 3), padding="middle"),
        lambda x: F.conv2d(x, torch.randn(2, 4, 3, 3), padding="same", stride=2),
        lambda x: torch.conv2d(x, torch.randn(4, 4, 1, 1), None, (1, 1), (0, 0), (1, 1), 3),
        lambda x: torch.conv2d(x, torch.randn(4, 1, 1), None, (1, 1), (0, 0), (1, 1), 1),
        lambda x: F.conv_transpose2d(x, torch.randn(5, 2, 3, 3)),
        lambda x: F.conv_transpose2d(x, torch.randn(4, 2, 3, 3), output_padding=1),
        lambda x: F.conv_transpose2d(x, torch.randn(4, 2, 3, 3), padding="same"),
        lambda x: F.linear(x, torch.randn(3, 5)),
        lambda x: F.dropout(x, 1.5),
        lambda x: F.silu(x, True, 3),
        lambda x: F.silu(x=x),
        lambda x: F.max_pool2d(x, 2, padding=3),
        lambda x: F.batch_norm(x, None, None),
        lambda x: F.batch_norm(x[:1, :, :1, :1], None, None, training=True),
        lambda x: F.batch_norm(x, None, None, torch.ones(5), training=True),
        lambda x: F.batch_norm(x, None, None, nn.Parameter(torch.ones(3)), None, True, 0.1, 1e-5),
        lambda x: F.batch_norm(x, None, None, None, None, True, 0.1, 1e-5, 7),
        lambda x: F.batch_norm(x, torch.zeros(4).requires_grad_(), torch.ones(4), None, None, True, 0.1, 1e-5),
        lambda x: F.batch_norm(x, None, None, None, None, 1, 0.1, 1e-5),
        lambda x: F.layer_norm(x, (13,)),
        lambda x: F.layer_norm(x, ()),
        lambda x: F.layer_norm(x, (12,), torch.ones(11)),
        lambda x: F.layer_norm(x, (12,), torch.ones(12, dtype=torch.float64)),
        lambda x: F.layer_norm(x, 12.0),
        lambda x: F.group_norm(x, 3),
        lambda x: F.group_norm(x, 0),
        lambda x: F.group_norm(x[0, 0, 0], 2),
        lambda x: F.group_norm(x, 2, torch.ones(3)),
        lambda x: F.group_norm(x[:1, :2, :1, :1], 2),
        lambda x: F.instance_norm(x[:, :, :1, :1]),
        lambda x: F.instance_norm(x, use_input_stats=False),
        lambda x: F.instance_norm(x, torch.zeros(5), torch.ones(5)),
        lambda x: F.rms_norm(x, (13,)),
        lambda x: F.rms_norm(x, (12,), 3.0),
        lambda x: x * torch.randn(5, 3),
        lambda x: x + torch.ones(3),
        lambda x: torch.mul(x, x2=x, other=x),
        lambda x: x.div(),
        lambda x: torch.fake_quantize_per_tensor_affine(x, 0.1, 300, 0, 255),
    ],
    ((2, 4, 8, 16), (2, 4, 10, 16)): [
        lambda q, k: attend(q, k),
        lambda q, k: attend(q, k[..., :3], k),
        lambda q, k: attend(q, k, k.double()),
        lambda q, k: attend(q, k, k, dropout_p=1.5),
        lambda q, k: attend(q, k, k, window=3),
        lambda q, k: attend(q, k, k, torch.ones(8, 3, dtype=torch.bool)),
        lambda q, k: attend(q, k[:, :3], k[:, :3], enable_gqa=True),
        lambda q, k: attend(q, k, 3),
    ],
    ((2, 3, 10, 9),): [
        lambda x: x.gather(3, INDEX + 20),
        lambda x: x.gather(5, INDEX),
        lambda x: x.take(INDEX + 9999),
        lambda x: x.masked_select(torch.ones(2, 9, dtype=torch.bool)),
        lambda x: x.amax(7),
        lambda x: x.amax((1, 1)),
        lambda x: torch.max(x, torch.randn(5)),
        lambda x: F.pad(x, (1, 2, 3), mode="reflect"),
        lambda x: F.pad(x, (20, 0, 0, 0), mode="reflect"),
        lambda x: F.grid_sample(x, torch.randn(5, 3, 4, 2), align_corners=False),
        lambda x: F.grid_sample(x, torch.randn(2, 3, 4, 2), mode="cubic"),
        lambda x: F.interpolate(x, (5, 5, 5), mode="area"),
    ],
    ((9, 7),): [
        lambda x: F.cross_entropy(x, LABELS + 7),
        lambda x: F.cross_entropy(x, LABELS - 1),
        lambda x: F.cross_entropy(x, LABELS[:8]),
        lambda x: F.cross_entropy(x, torch.zeros(9)),
        lambda x: F.cross_entropy(x, torch.zeros(9, 7, dtype=torch.int64)),
        lambda x: F.cross_entropy(x, LABELS, torch.ones(6)),
        lambda x: F.cross_entropy(x, LABELS, reduction="median"),
        lambda x: F.cross_entropy(x, LABELS, label_smoothing=1.5),
        lambda x: F.nll_loss(x, LABELS + 7),
        lambda x: F.nll_loss(x, torch.zeros(9, 7)),
        lambda x: F.mse_loss(x, torch.rand(9, 7), reduction="total"),
        lambda x: F.smooth_l1_loss(x, torch.rand(9, 7), beta=-1),
        lambda x: F.huber_loss(x, torch.rand(9, 7), delta=0),
        lambda x: F.binary_cross_entropy_with_logits(x, torch.rand(4, 7)),
        lambda x: F.softmax(x, 2),
        lambda x: F.softmax(x, "one"),
        lambda x: x.log_softmax(-3),
        lambda x: torch.softmax(x, 1, dtype=torch.int64),
    ],
    ((3, 4),): [
        lambda x: x @ torch.randn(3, 5, requires_grad=True),
        lambda x: torch.mm(x, torch.randn(4, 2, 3)),
        lambda x: torch.mm(x, other=torch.randn(4, 5)),
        lambda x: torch.matmul(x, mat2=torch.randn(4, 5)),
        lambda x: torch.matmul(x, torch.randn(4, 5).double()),
        lambda x: torch.addmm(x, x, x),
        lambda x: torch.addmm(x, x, x, gamma=2),
        lambda x: torch.einsum("ij,jk->ikk", x, x),
        lambda x: torch.einsum("ij,jk->im", x, torch.randn(4, 4)),
        lambda x: torch.einsum("ij", x, x),
    ],
    ((4, 3, 6),): [
        lambda x: F.prelu(x, torch.ones(5)),
        lambda x: F.prelu(x, torch.ones(1, dtype=torch.float64)),
        lambda x: F.glu(x, 1),
        lambda x: F.glu(x, 4),
        lambda x: F.rrelu(x, 0.5, 0.1, training=True),
        lambda x: F.softshrink(x, -1.0),
        lambda x: F.softsign(x, 3),
        lambda x: F.dropout(x, 0.3, None),
        lambda x: torch.dropout(x, 0.3, train=None),
        *(lambda x, drop=drop: drop(x, -0.1, True) for drop in (F.dropout1d, F.dropout2d, F.alpha_dropout)),
        *(lambda x, drop=drop: drop(x, 1.5, True) for drop in (F.dropout1d, F.dropout2d, F.feature_alpha_dropout)),
    ],
}


@pytest.mark.parametrize(("shapes", "call"), [(shapes, call) for shapes, calls in CALLS.items() for call in calls])
def test_wrong_arguments_get_torchs_own_error(shapes, call):
    assert_same_error(call, *(torch.randn(shape, requires_grad=True) for shape in shapes))


@pytest.mark.parametrize(
    "function",
    [
        *(nn.GLU(), nn.PReLU(), torch.abs, nn.Softsign()),
        *(lambda x: F.cross_entropy(x, torch.arange(8) % 6), lambda x: x.softmax(1), lambda x: x.log_softmax(1)),
    ],
)
@pytest.mark.parametrize("mode", SaveMode)
def test_graphs_are_kept_and_refuse_a_second_derivative(function, mode):
    x = torch.randn(8, 6, requires_grad=True)
    with region(settings(save_mode=mode)):
        out = function(x * 1).sum()
    first, second = (torch.autograd.grad(out, x, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)
    with pytest.raises(RuntimeError, match="double backward"):
        torch.autograd.grad(out, x, create_graph=True)


@pytest.mark.parametrize("function", [lambda x: F.layer_norm(x, (64,)), torch.square, torch.exp])
@pytest.mark.parametrize("unpack", [Tensor.float, lambda x: x.repeat_interleave(2)[::2]])
def test_hooks_that_give_packed_bytes_back_in_another_form(function, unpack):
    x = torch.randn(80, 64, requires_grad=True)
    hooks = torch.autograd.graph.saved_tensors_hooks(
        lambda x: x, lambda x: unpack(x) if not x.is_floating_point() else x
    )
    with hooks, region(settings()):
        out = function(x * 1.0).sum()
    with pytest.raises(ValueError, match="saved-tensor hooks around the region must give tensors back as they were"):
        out.backward()


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.complex64])
def test_weights_that_are_no_floats_are_not_cast(dtype, autocast):
    """Also under autocast, which casts only floats."""
    x = torch.randn(2, 4, 3, 3)
    for layer, sizes in ((F.linear, (5, 3)), (F.conv2d, (5, 4, 1, 1))):
        weight = nn.Parameter(torch.randn(sizes).to(dtype), requires_grad=dtype.is_complex)
        messages = []
        for chosen in (None, settings()):
            with region(chosen), torch.autocast("cpu", enabled=autocast), pytest.raises(RuntimeError) as caught:
                layer(x.clone().requires_grad_(), weight)
            messages.append(str(caught.value))
        assert messages[0] == messages[1]
