import pytest
import torch
from brevitas.inject import ExtendedInjector, this, value
from brevitas.quant import Int8ActPerTensorFloat
from hypothesis import assume, given
from hypothesis import strategies as st

from brevact.injectors import BackwardQuantSolver, NearestRounding, SaveQuantized, StochBackward2bit, UniformBuckets
from brevact.injectors.injector_type import known_names
from brevact.quantizers import Granularity, Rounding, UniformQuantizer
from tests.quantizers.subjects import takes_rounding

SETTINGS = {
    "bit_width",
    "bucket_size",
    "channel_dim",
    "derive_min_bits",
    "double_backward",
    "forward_quant",
    "granularity",
    "min_numel",
    "minimum_dtype",
    "quantizer",
    "recompute",
    "residual_bit_width",
    "rounding",
    "save_mode",
    "scale_dtype",
    "score_bit_width",
}


#: Names that belong to the injector or to the layer around it.
STRUCTURE = {"act_impl", "passthrough_act", "backward_settings", "proxy_class", "let"}


class SmallBuckets(ExtendedInjector):
    bucket_size = 64


class TypoFragment(ExtendedInjector):
    buket_size = 64


@given(
    overrides=st.fixed_dictionaries(
        {},
        optional={
            "bit_width": st.integers(1, 8),
            "bucket_size": st.none() | st.integers(1, 10_000),
            "rounding": st.sampled_from(Rounding),
            "granularity": st.sampled_from(Granularity),
            "channel_dim": st.integers(-3, 3),
            "scale_dtype": st.sampled_from([torch.bfloat16, torch.float32]),
            "minimum_dtype": st.sampled_from([torch.bfloat16, torch.float32]),
        },
    )
)
def test_let_passes_every_setting_to_the_quantizer(overrides):
    assume("rounding" not in overrides or takes_rounding(overrides["rounding"], overrides))
    assert StochBackward2bit.let(**overrides).quantizer == UniformQuantizer(**{"bit_width": 2, **overrides})


def test_subclass_overrides_a_setting():
    class MyBackward(StochBackward2bit):
        bucket_size = 128

    assert MyBackward.quantizer.bucket_size == 128
    assert MyBackward.quantizer.bit_width == 2


def test_and_takes_the_first_operand_where_both_state_a_setting():
    assert (SmallBuckets & StochBackward2bit).quantizer.bucket_size == 64
    assert (StochBackward2bit & SmallBuckets).quantizer.bucket_size == 512


def test_fragments_compose_to_a_quantizer_of_ones_own():
    class Mine(NearestRounding, SmallBuckets, UniformBuckets, SaveQuantized, BackwardQuantSolver):
        bit_width = 3

    assert Mine.quantizer == UniformQuantizer(bit_width=3, rounding=Rounding.NEAREST, bucket_size=64)


def test_value_brings_its_arguments_as_settings():
    class Scaled(StochBackward2bit):
        group = 32

        @value
        def bucket_size(group, groups_per_bucket=2):
            return group * groups_per_bucket

    assert Scaled.quantizer.bucket_size == 64
    assert Scaled.let(groups_per_bucket=4).quantizer.bucket_size == 128
    with pytest.raises(TypeError, match="did you mean group"):
        Scaled.let(grupe=3)


def test_this_links_a_setting_to_another_name():
    class Linked(StochBackward2bit):
        bucket_size = this.group
        group = 32

    assert Linked.quantizer.bucket_size == 32


def test_another_quantizer_object_replaces_the_uniform_one():
    class Raw(ExtendedInjector):
        @value
        def quantizer(levels):
            return UniformQuantizer(bit_width=levels.bit_length() - 1)

    class Format(Raw, SaveQuantized, BackwardQuantSolver):
        levels = 16

    assert Format.backward_settings.quantizer.bit_width == 4
    assert known_names(Format) >= {"levels", "save_mode", "min_numel"}
    with pytest.raises(TypeError, match=r"bit_width=3 is not a setting of Format"):
        Format.let(bit_width=3)


@pytest.mark.parametrize(
    ("typo", "nearest"),
    [
        ("buket_size", "bucket_size"),
        ("bit_widht", "bit_width"),
        ("save_node", "save_mode"),
        ("scaledtype", "scale_dtype"),
    ],
)
def test_let_names_the_nearest_setting(typo, nearest):
    with pytest.raises(TypeError) as caught:
        StochBackward2bit.let(**{typo: 7})
    message = str(caught.value)
    assert f"{typo}=7 is not a setting of StochBackward2bit" in message
    assert f"did you mean {nearest}?" in message
    assert all(name in message for name in SETTINGS)


NAMES = st.from_regex(r"[a-z][a-z_]{0,15}", fullmatch=True)


OTHERS = NAMES.filter(lambda name: name not in SETTINGS | STRUCTURE and not name.startswith("forward_"))


@given(name=OTHERS)
def test_let_refuses_every_other_name(name):
    with pytest.raises(TypeError, match=f"{name}=1 is not a setting of StochBackward2bit"):
        StochBackward2bit.let(**{name: 1})


def test_class_statement_refuses_an_annotation():
    with pytest.raises(TypeError, match=r"bucket_size of Annotated is annotated.*drop the annotation"):

        class Annotated(StochBackward2bit):
            bucket_size: int = 128


@pytest.mark.parametrize(
    "compose", [lambda: TypoFragment & StochBackward2bit, lambda: Int8ActPerTensorFloat & StochBackward2bit]
)
def test_and_refuses_names_that_nothing_asks_for(compose):
    with pytest.raises(TypeError, match="is not a setting of"):
        compose()
