import pickle

import pytest
import torch

from recipes import files
from recipes.recipe import RecipeError


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


def test_rows_are_read_back(tmp_path):
    path = tmp_path / "rows.csv"
    assert files.read_rows(path) == []
    files.write_rows(path, ("epoch", "loss", "name"), [{"epoch": 1, "loss": 1 / 3, "name": "a"}])
    assert path.read_text() == "epoch,loss,name\n1,0.333333333,a\n"
    assert files.read_rows(path) == [{"epoch": "1", "loss": "0.333333333", "name": "a"}]


@pytest.mark.parametrize("kept", [0, 10, 0.5, 0.99])
def test_read_checkpoint_refuses_a_damaged_file(tmp_path, kept):
    path = tmp_path / "checkpoint.pt"
    files.write_checkpoint(path, {"names": ("a=1",), "tensor": torch.arange(1000)})
    assert files.read_checkpoint(path)["tensor"].tolist() == list(range(1000))
    content = path.read_bytes()
    path.write_bytes(content[: int(kept * len(content)) if kept < 1 else kept])
    with pytest.raises(RecipeError, match=r"checkpoint.pt is not a readable checkpoint"):
        files.read_checkpoint(path)


class Evil:
    def __reduce__(self):
        return print, ("code in a checkpoint ran",)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"some text", "is not a readable checkpoint"),
        (pickle.dumps(Evil(), protocol=2), "is not a readable checkpoint"),
        ([1], "holds a list, no checkpoint"),
        (torch.zeros(2), "holds a Tensor, no checkpoint"),
    ],
)
def test_read_checkpoint_refuses_what_is_none(tmp_path, capsys, content, message):
    path = tmp_path / "checkpoint.pt"
    path.write_bytes(content) if isinstance(content, bytes) else torch.save(content, path)
    with pytest.raises(RecipeError, match=message):
        files.read_checkpoint(path)
    assert not capsys.readouterr().out
