import pytest

from recipes.bisection import largest


@pytest.mark.parametrize("limit", [0, 1, 2, 3, 7, 8, 31, 32, 33, 100])
@pytest.mark.parametrize("start", [1, 4, 8])
def test_largest_is_exact_at_resolution_zero(limit: int, start: int):
    tried: list[int] = []

    def fits(size: int) -> bool:
        tried.append(size)
        return size <= limit

    assert largest(fits, start, most=64, resolution=0) == min(limit, 64)
    assert len(tried) == len(set(tried)) <= 12  # no size twice
    assert 0 < min(tried) and max(tried) <= 64


def test_largest_ends_within_the_resolution():
    tried: list[int] = []

    def fits(size: int) -> bool:
        tried.append(size)
        return size <= 1000

    found = largest(fits, 8, most=1 << 20, resolution=1 / 16)
    assert found <= 1000 < found * (1 + 1 / 16) + 1
    assert len(tried) <= 13
