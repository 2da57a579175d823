import os
import pickle
import struct

import numpy as np
import pytest
import torch

from recipes.data import LOADERS
from recipes.errors import RecipeError

FINE, COARSE = b"fine_labels", b"coarse_labels"


def images(count, seed):
    return np.random.default_rng(seed).integers(0, 256, (count, 3072), dtype=np.uint8)


def python2_pickle(data: np.ndarray, labels: list[int]) -> bytes:
    """The opcodes that Python 2 wrote for {'data': data, 'labels': labels}: byte strings, NumPy's old module names."""
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
        + b"(K\x01"
        + b"".join(b"J" + struct.pack("<i", size) for size in data.shape)
        + b"\x86cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
        + b"\x89T"
        + struct.pack("<i", data.nbytes)
        + data.tobytes()
        + b"tb"
    )
    numbers = b"](" + b"".join(b"K" + bytes([label]) for label in labels) + b"e"
    return b"\x80\x02}(U\x04data" + array + b"U\x06labels" + numbers + b"u."


def python3_pickle(data: np.ndarray, labels: list[int]) -> bytes:
    return pickle.dumps({b"data": data, b"labels": labels}, protocol=2)


def cifar10_files(folder, write, suffix=""):
    """Writes six files of four images each; returns all pixels and labels in order."""
    folder.mkdir(parents=True)
    names = [*(f"data_batch_{i}{suffix}" for i in range(1, 6)), f"test_batch{suffix}"]
    all_pixels, all_labels = [], []
    for seed, name in enumerate(names):
        pixels, labels = images(4, seed), [(seed + i) % 10 for i in range(4)]
        (folder / name).write_bytes(write(pixels, labels))
        all_pixels.append(pixels)
        all_labels += labels
    return torch.from_numpy(np.concatenate(all_pixels)).view(-1, 3, 32, 32), torch.tensor(all_labels)


def binary(pixels, labels):
    return np.concatenate([np.array(labels, np.uint8)[:, None], pixels], axis=1).tobytes()


@pytest.mark.parametrize(
    ("folder", "write", "suffix"),
    [
        ("cifar-10-batches-bin", binary, ".bin"),
        ("cifar-10-batches-py", python2_pickle, ""),
        ("cifar-10-batches-py", python3_pickle, ""),
    ],
)
@pytest.mark.parametrize("inside", [False, True])
def test_load_cifar10_reads_every_official_format(tmp_path, folder, write, suffix, inside):
    pixels, labels = cifar10_files(tmp_path / folder, write, suffix)
    data = LOADERS["cifar10"](tmp_path / folder if inside else tmp_path, None, None)
    assert torch.equal(data.train.images, pixels[:20]) and torch.equal(data.train.labels, labels[:20])
    assert torch.equal(data.test.images, pixels[20:]) and torch.equal(data.test.labels, labels[20:])
    assert (data.classes, data.channels, data.image_size, data.augment) == (10, 3, 32, True)


def test_load_cifar100_reads_fine_labels_of_both_formats(tmp_path):
    pixels, fine, coarse = images(6, 0), [99, 0, 41, 7, 99, 3], [19, 4, 2, 1, 19, 0]
    for name in ("train", "test"):
        for folder in ("python/cifar-100-python", "binary/cifar-100-binary"):
            (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        content = pickle.dumps({b"data": pixels, FINE: fine, COARSE: coarse}, protocol=2)
        (tmp_path / "python/cifar-100-python" / name).write_bytes(content)
        rows = np.concatenate([np.array([coarse, fine], np.uint8).T, pixels], axis=1)
        (tmp_path / f"binary/cifar-100-binary/{name}.bin").write_bytes(rows.tobytes())
    for kind in ("python", "binary"):
        data = LOADERS["cifar100"](tmp_path / kind, None, None)
        assert data.train.labels.tolist() == fine
        assert torch.equal(data.test.images.view(6, -1), torch.from_numpy(pixels))
        assert data.classes == 100


def test_load_cifar10_takes_the_same_part_every_time(tmp_path):
    cifar10_files(tmp_path / "cifar-10-batches-bin", binary, ".bin")
    small, large = (LOADERS["cifar10"](tmp_path, size, 2).train for size in (5, 9))
    assert len(small) == 5
    assert torch.equal(small.images, large.images[:5]) and torch.equal(small.labels, large.labels[:5])
    with pytest.raises(RecipeError, match=r"--train-size 21 is not possible: the data set has 20 images"):
        LOADERS["cifar10"](tmp_path, 21, None)


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_load_cifar_says_what_is_missing_and_where_to_get_it(tmp_path, name):
    with pytest.raises(RecipeError, match=rf"expected {tmp_path}/cifar-.*--data-dir.*download cifar-.*https://"):
        LOADERS[name](tmp_path, None, None)


def test_load_cifar10_names_a_missing_file(tmp_path):
    cifar10_files(tmp_path / "cifar-10-batches-bin", binary, ".bin")
    (tmp_path / "cifar-10-batches-bin/data_batch_3.bin").unlink()
    with pytest.raises(RecipeError, match=r"cifar-10-batches-bin lacks data_batch_3.bin; download"):
        LOADERS["cifar10"](tmp_path, None, None)


def wrong_label(content):
    return b"\x0a" + content[1:]


def cut_short(content):
    return content[:-1]


def emptied(content):
    return b""


@pytest.mark.parametrize("damage", [wrong_label, cut_short, emptied])
def test_load_cifar10_refuses_damaged_binary_files(tmp_path, damage):
    cifar10_files(tmp_path / "cifar-10-batches-bin", binary, ".bin")
    path = tmp_path / "cifar-10-batches-bin/data_batch_2.bin"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(RecipeError, match=r"data_batch_2.bin is damaged: .*download the data set again"):
        LOADERS["cifar10"](tmp_path, None, None)


GOOD = {b"data": images(4, 0), b"labels": [1, 2, 3, 4]}


@pytest.mark.parametrize(
    "content",
    [
        cut_short(pickle.dumps(GOOD)),
        pickle.dumps(GOOD)[:2000],
        b"",
        b"not a pickle",
        pickle.dumps([1, 2]),
        pickle.dumps({b"labels": [1, 2, 3, 4]}),
        pickle.dumps(GOOD | {b"labels": [1, 2, 3]}),
        pickle.dumps(GOOD | {b"labels": [1, 2, 3, 10]}),
        pickle.dumps(GOOD | {b"labels": [1, 2, 3, 10**30]}),
        pickle.dumps(GOOD | {b"labels": [1, 2, 3, "4"]}),
        pickle.dumps(GOOD | {b"data": images(4, 0)[:, :-1]}),
        pickle.dumps(GOOD | {b"data": images(4, 0).astype(np.float32)}),
        pickle.dumps(GOOD | {b"data": np.array([None])}),
    ],
)
def test_load_cifar10_refuses_damaged_pickles(tmp_path, content):
    cifar10_files(tmp_path / "cifar-10-batches-py", python3_pickle)
    (tmp_path / "cifar-10-batches-py/data_batch_4").write_bytes(content)
    with pytest.raises(RecipeError, match=r"data_batch_4 is damaged: .*download the data set again"):
        LOADERS["cifar10"](tmp_path, None, None)


class _Touch:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_load_cifar10_runs_no_code_from_a_pickle(tmp_path):
    cifar10_files(tmp_path / "cifar-10-batches-py", python3_pickle)
    made = tmp_path / "made"
    (tmp_path / "cifar-10-batches-py/test_batch").write_bytes(pickle.dumps(GOOD | {b"extra": _Touch(str(made))}))
    with pytest.raises(RecipeError, match=r"it asks for \w+\.mkdir, which no data set needs"):
        LOADERS["cifar10"](tmp_path, None, None)
    assert not made.exists()
