import pytest
import torch

from recipes.data import Batches, Split
from recipes.data.batches import crop_and_flip

CPU = torch.device("cpu")


def make_batches(count=10, batch_size=4, **options):
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (count, 3, 8, 8), dtype=torch.uint8, generator=generator)
    normalization = (0.1, 0.2, 0.3), (0.5, 0.6, 0.7)
    return Batches(Split(images, torch.arange(count)), normalization, batch_size, device=CPU, **options)


def test_batches_normalize_in_order_for_testing():
    batches = make_batches()
    images, labels = (torch.cat(parts) for parts in zip(*batches.epoch(), strict=True))
    assert len(batches) == 3 and labels.tolist() == list(range(10))
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in ((0.1, 0.2, 0.3), (0.5, 0.6, 0.7)))
    torch.testing.assert_close(images, (batches.images / 255 - mean) / std)


def test_batches_visit_each_training_image_at_most_once_an_epoch():
    batches = make_batches(train=True)
    labels = torch.cat([labels for _, labels in batches.epoch(1)]).tolist()
    assert len(batches) == 2 and len(set(labels)) == len(labels) == 8


def test_batches_use_all_images_when_there_are_fewer_than_a_batch():
    batches = make_batches(count=3, train=True)
    assert [len(labels) for _, labels in batches.epoch(1)] == [3]


def test_batches_depend_on_seed_and_epoch_alone():
    def content(seed, epoch):
        batches = make_batches(train=True, augment=True, seed=seed)
        torch.rand(seed + epoch)  # the global generator plays no part
        return torch.cat([images for images, _ in batches.epoch(epoch)])

    assert torch.equal(content(1, 2), content(1, 2))
    assert not torch.equal(content(1, 2), content(1, 3))
    assert not torch.equal(content(1, 2), content(2, 2))


def test_batches_without_padding_mirror_and_shift_nothing():
    plain, mirrored = (
        next(iter(make_batches(train=True, **more).epoch())) for more in ({}, {"augment": True, "padding": 0})
    )
    assert torch.equal(plain[1], mirrored[1])
    same = [(a == b).all() or (a == b.flip(-1)).all() for a, b in zip(plain[0], mirrored[0], strict=True)]
    assert all(same) and not torch.equal(plain[0], mirrored[0])


@pytest.mark.parametrize(("height", "width"), [(8, 8), (4, 6)])
def test_crop_and_flip_gives_shifted_and_mirrored_images(height, width):
    padding, count = 2, 400
    images = torch.arange(1, count * 2 * height * width + 1).view(count, 2, height, width)
    results = crop_and_flip(images, padding, torch.Generator().manual_seed(0))
    padded = torch.nn.functional.pad(images, (padding,) * 4)
    found = torch.zeros(2, 2 * padding + 1, 2 * padding + 1)
    for top in range(2 * padding + 1):
        for left in range(2 * padding + 1):
            crop = padded[:, :, top : top + height, left : left + width]
            for flip, candidate in enumerate((crop, crop.flip(-1))):
                found[flip, top, left] = (candidate == results).all((1, 2, 3)).sum()
    assert found.sum() == count  # every result is exactly one of the candidates
    assert (found > 0).all()  # 400 draws of 50: one is left out with probability 50 * 0.98**400, about 0.015
    flipped, error = found[1].sum().item(), 5 * (count / 4) ** 0.5
    assert abs(flipped - count / 2) < error
