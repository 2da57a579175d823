import pytest
import torch

import brevact
from recipes.models import GPT, GPT_SIZES
from recipes.models.transformer import Size

TINY = Size(depth=2, heads=2, width=16)


def make(**options):
    torch.manual_seed(0)
    return GPT(TINY, vocabulary=11, context=8, **options)


def test_gpt_has_the_parameters_of_gpt2():
    with torch.device("meta"):
        model = GPT(GPT_SIZES["gpt2"], vocabulary=50_257, context=1024)
    assert sum(parameter.numel() for parameter in model.parameters()) == 124_439_808


def test_gpt_head_has_the_weight_of_the_embedding_or_its_own():
    tied, separate = make(), make(head="separate")
    count = [sum(parameter.numel() for parameter in model.parameters()) for model in (tied, separate)]
    assert count[1] - count[0] == 11 * 16
    tokens = torch.arange(8)[None]
    tied.eval(), separate.eval()
    separate.load_state_dict(tied.state_dict() | {"head.weight": tied.tokens.weight})
    assert torch.equal(tied(tokens), separate(tokens))


@pytest.mark.parametrize("options", [{}, {"norm": "rms", "mlp": "swiglu", "head": "separate"}])
def test_gpt_predicts_from_what_came_before_alone(options):
    model = make(**options)
    tokens = torch.randint(0, 11, (3, 8))
    changed = tokens.clone()
    changed[:, 5] = (changed[:, 5] + 1) % 11
    before, after = model(tokens), model(changed)
    assert before.shape == (3, 8, 11)
    torch.testing.assert_close(before[:, :5], after[:, :5], rtol=0, atol=1e-6)
    assert (before[:, 5:] - after[:, 5:]).abs().amax((0, 2)).min() > 1e-4


def test_gpt_tells_places_apart():
    logits = make()(torch.zeros(1, 8, dtype=torch.int64))[0]
    assert (logits[1:] - logits[:-1]).abs().amax(1).min() > 1e-4


def test_gpt_refuses_an_unknown_head():
    with pytest.raises(ValueError, match="head='own' is not known; accepted: tied, separate"):
        make(head="own")


@pytest.mark.parametrize("options", [{}, {"norm": "rms", "mlp": "swiglu", "head": "separate"}])
def test_gpt_trains_with_the_same_forward_when_it_stores_packed_activations(options):
    model = make(**options)
    tokens = torch.randint(0, 11, (16, 8))
    plain = model(tokens)
    brevact.quantize_backward(model, brevact.StochBackward2bit)
    packed = model(tokens)
    assert torch.equal(plain, packed)
    packed.logsumexp(2).sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    report = brevact.memory_report(model, tokens)
    hidden = [row for row in report.rows if row.layer.endswith("mlp.out")]
    assert len(hidden) == 2 and all(row.saved_bytes < row.plain_bytes / 14 for row in hidden)


def test_generate_repeats_for_its_seed_and_leaves_the_mode():
    model = make(dropout=0.5)

    def draw(seed):
        generator = torch.Generator().manual_seed(seed)
        return model.generate(torch.tensor([3]), 20, temperature=1.0, generator=generator)

    assert draw(0).shape == (20,) and torch.equal(draw(0), draw(0)) and not torch.equal(draw(0), draw(1))
    assert model.training


def test_generate_takes_the_likeliest_token_as_the_temperature_falls():
    model = make().eval()
    drawn = model.generate(torch.tensor([3]), 12, temperature=1e-4, generator=torch.Generator().manual_seed(0))
    tokens = [3, *drawn.tolist()]
    for place in range(1, len(tokens)):
        seen = torch.tensor([tokens[max(0, place - 8) : place]])
        assert tokens[place] == model(seen)[0, -1].argmax()
