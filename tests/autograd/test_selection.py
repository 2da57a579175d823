import pytest
import torch

from brevact.qat.forward_statistics import _among_the_largest, kth_magnitude

SIZE = 512 * 64 + 77


def elements(seed=0):
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(seed))


def check(x, rank):
    value, index = kth_magnitude(x, rank)
    expected = torch.kthvalue(x.abs(), rank, keepdim=True)
    assert torch.equal(value.nan_to_num(7e7), expected[0].nan_to_num(7e7))
    assert torch.equal(index, expected[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("from_above", [1, 2, 8, 9, 1000, SIZE])
def test_kth_magnitude_is_that_of_torch(from_above, dtype):
    check(elements().to(dtype), SIZE - from_above + 1)


def test_blocks_are_used_for_ranks_near_the_top_alone():
    assert _among_the_largest(elements(), SIZE) is not None
    assert _among_the_largest(elements(), SIZE - 7) is not None
    assert _among_the_largest(elements(), SIZE - 8) is None


@pytest.mark.parametrize("value", [9.0, -9.0, torch.nan, torch.inf, -torch.inf])
def test_a_value_at_the_end_or_not_finite_may_lie_anywhere(value):
    for place in (0, 5, 600, SIZE - 1):
        x = elements()
        x[place] = value
        for from_above in (1, 2, 3):
            check(x, SIZE - from_above + 1)


def test_of_equal_elements_torch_picks_one():
    x = elements().clamp(-1.5, 1.5)
    check(x, SIZE - 3)
    check(torch.zeros(SIZE), SIZE)


def test_strided_elements():
    check(torch.stack((elements(), elements(1)), 1)[:, 0], SIZE - 2)
