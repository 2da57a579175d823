import pickle

import pytest
import torch

import brevact.injectors
from brevact.autograd import SaveMode
from brevact.autograd.settings import DEFAULT_MIN_NUMEL
from brevact.quantizers import Granularity, Rounding, UniformQuantizer

LEAVES = [
    (getattr(brevact.injectors, f"{stem}Backward{bit_width}bit"), bit_width, rounding)
    for stem, rounding in (("Nearest", Rounding.NEAREST), ("Stoch", Rounding.STOCHASTIC), ("Dither", Rounding.DITHERED))
    for bit_width in range(1, 9)
]
leaves = pytest.mark.parametrize(("leaf", "bit_width", "rounding"), LEAVES, ids=[leaf.__name__ for leaf, *_ in LEAVES])


@leaves
def test_leaf_resolves_to_its_quantizer(leaf, bit_width, rounding):
    assert leaf.quantizer == UniformQuantizer(
        bit_width=bit_width,
        rounding=rounding,
        bucket_size=512,
        granularity=Granularity.BUCKET,
        scale_dtype=torch.bfloat16,
        minimum_dtype=torch.float32,
    )


@leaves
def test_leaf_resolves_to_its_settings(leaf, bit_width, rounding):
    settings = leaf.backward_settings
    assert settings.quantizer == leaf.quantizer
    assert settings.save_mode is SaveMode.SAVE_QUANTIZED
    assert settings.min_numel == DEFAULT_MIN_NUMEL
    assert hash(settings) == hash(leaf.backward_settings)


@leaves
def test_leaf_is_public_and_importable(leaf, bit_width, rounding):
    assert leaf.__name__ in brevact.injectors.__all__
    assert pickle.loads(pickle.dumps(leaf)) is leaf


def test_all_names_exist_once():
    names = brevact.injectors.__all__
    assert len(names) == len(set(names))
    assert all(hasattr(brevact.injectors, name) for name in names)
