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
