import pickle

import pytest
import torch

from recipes import files
from recipes.errors import RecipeError


def test_write_atomically_leaves_the_old_file_when_writing_fails(tmp_path):
    path = tmp_path / "file"
    files.write_atomically(path, lambda file: file.write(b"old"))

    def write_half(file):
        file.write(b"ne")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        files.write_atomically(path, write_half)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_write_rows_is_read_back(tmp_path):
    path = tmp_path / "rows.csv"
    files.write_rows(path, ("epoch", "loss", "name"), [{"epoch": 1, "loss": 1 / 3, "name": "a"}])
    assert path.read_text() == "epoch,loss,name\n1,0.333333333,a\n"
    assert files.read_rows(path) == [{"epoch": "1", "loss": "0.333333333", "name": "a"}]


def test_read_checkpoint_returns_what_was_written(tmp_path):
    path = tmp_path / "checkpoint.pt"
    files.write_checkpoint(path, {"settings": {"act_override": ("a=1",)}, "tensor": torch.arange(3)})
    content = files.read_checkpoint(path)
    assert content["settings"] == {"act_override": ("a=1",)} and content["tensor"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("kept", [0, 10, 0.5, 0.99])
def test_read_checkpoint_refuses_a_damaged_file(tmp_path, kept):
    path = tmp_path / "checkpoint.pt"
    files.write_checkpoint(path, {"tensor": torch.arange(1000)})
    content = path.read_bytes()
    path.write_bytes(content[: int(kept * len(content)) if kept < 1 else kept])
    with pytest.raises(RecipeError, match=r"checkpoint.pt is not a readable checkpoint"):
        files.read_checkpoint(path)


def test_read_checkpoint_says_where_it_looked(tmp_path):
    with pytest.raises(RecipeError, match=rf"there is no {tmp_path}/checkpoint.pt; --resume takes the folder"):
        files.read_checkpoint(tmp_path / "checkpoint.pt")


@pytest.mark.parametrize("content", [b"some text", b"{}", b"[1]", pickle.dumps([1], protocol=2)])
def test_read_checkpoint_refuses_what_is_no_checkpoint(tmp_path, content):
    path = tmp_path / "checkpoint.pt"
    path.write_bytes(content)
    with pytest.raises(RecipeError, match=r"checkpoint.pt is not a.* checkpoint"):
        files.read_checkpoint(path)


@pytest.mark.parametrize("content", [[1], 3, torch.zeros(2)])
def test_read_checkpoint_refuses_another_object(tmp_path, content):
    path = tmp_path / "checkpoint.pt"
    torch.save(content, path)
    with pytest.raises(RecipeError, match=rf"it holds a {type(content).__name__}; start a new run"):
        files.read_checkpoint(path)


def test_write_path_atomically_keeps_the_suffix_and_leaves_the_old_file_when_writing_fails(tmp_path):
    path = tmp_path / "picture.png"
    path.write_text("old")

    def write_half(temporary):
        assert temporary.suffix == ".png" and temporary.parent == tmp_path
        temporary.write_text("ne")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        files.write_path_atomically(path, write_half)
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_check_writable_leaves_nothing(tmp_path):
    files.check_writable(tmp_path / "a" / "b")
    files.check_writable(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["file", "file/below"])
def test_check_writable_refuses_a_file(tmp_path, name):
    (tmp_path / "file").write_text("kept")
    with pytest.raises(RecipeError, match=rf"cannot write to {tmp_path}/{name} \(.*--out-dir"):
        files.check_writable(tmp_path / name)
    assert (tmp_path / "file").read_text() == "kept"
