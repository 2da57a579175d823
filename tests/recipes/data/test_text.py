import pytest
import torch

from recipes.data.text import TextBatches, different_paragraphs, load_text, python_reference, split_paragraphs
from recipes.errors import RecipeError

CPU = torch.device("cpu")


def windows(batches, epoch=0):
    inputs, targets = (torch.cat(parts) for parts in zip(*batches.epoch(epoch), strict=True))
    return inputs, targets


def words(paragraph):
    return " ".join(paragraph.split())


def test_different_paragraphs_leaves_out_repetitions_but_for_white_space():
    text = "one\ntwo\n\nthree\n \n\n  one two\n\nthree.\n\n\n"
    assert different_paragraphs(text) == ["one\ntwo", "three", "three."]


@pytest.mark.parametrize("lengths", [[10] * 20, [1, 5, 300, 2, 7, 30], [50, 1]])
def test_split_paragraphs_holds_out_the_last_tenth(lengths):
    paragraphs = [chr(97 + index) * length for index, length in enumerate(lengths)]
    train, test = split_paragraphs(paragraphs)
    assert "\n\n".join(part for part in (train, test) if part) == "\n\n".join(paragraphs)
    held_out = sum(map(len, test.split("\n\n")))
    first = len(paragraphs) - len(test.split("\n\n")) if test else len(paragraphs)
    assert held_out <= 0.1 * sum(lengths) < held_out + lengths[first - 1]


def test_load_text_holds_out_paragraphs_that_are_not_trained_on():
    data = load_text(None)
    train, test = (data.decode(part.tolist()) for part in (data.train, data.test))
    trained_on, held_out = ({words(paragraph) for paragraph in text.split("\n\n")} for text in (train, test))
    assert len(held_out) > 100 and not trained_on & held_out
    assert trained_on | held_out == {words(paragraph) for paragraph in different_paragraphs(python_reference())}
    assert 0.09 < len(test) / (len(train) + len(test)) <= 0.1
    assert "statement" in train and sorted(set(train + test)) == list(data.characters)


def test_load_text_takes_a_file_and_sizes(tmp_path):
    path = tmp_path / "bØk.txt"
    path.write_text("\n\n".join(f"{number} ø" for number in range(100)), encoding="utf-8")
    whole, part = load_text(path), load_text(path, 30, 10)
    assert whole.name == "bØk" and "ø" in whole.characters
    assert part.decode(part.train.tolist()) == whole.decode(whole.train.tolist())[:30]
    assert part.decode(part.test.tolist()) == whole.decode(whole.test.tolist())[:10]


@pytest.mark.parametrize(
    ("content", "sizes", "message"),
    [
        (None, (), r"--text-file .*text.txt cannot be read \(No such file"),
        (b"\xff\xfe", (), r"text.txt is not a text in UTF-8"),
        (b"", (), "fewer than two different paragraphs"),
        (b"same\n\nsame", (), "fewer than two different paragraphs"),
        (b"a" * 90 + b"\n\n" + b"b" * 9, (91, None), "--train-size 91 is not possible: .* has 90 characters"),
        (b"a" * 90 + b"\n\n" + b"b" * 9, (None, 10), "--test-size 10 is not possible: .* has 9 characters"),
    ],
)
def test_load_text_refuses(tmp_path, content, sizes, message):
    path = tmp_path / "text.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(RecipeError, match=message):
        load_text(path, *sizes)


@pytest.mark.parametrize("train", [False, True])
def test_text_batches_give_each_character_and_the_one_behind_it(train):
    batches = TextBatches(torch.arange(50), 4, 3, device=CPU, train=train)
    inputs, targets = windows(batches)
    assert torch.equal(targets, inputs + 1) and inputs.shape[1] == 4
    assert len(inputs.unique()) == inputs.numel()  # windows do not overlap
    assert len(batches) == len(list(batches.epoch())) == (3 if train else 4)


def test_text_batches_test_on_all_whole_windows_in_order():
    inputs, targets = windows(TextBatches(torch.arange(13), 4, 2, device=CPU))
    assert inputs.flatten().tolist() == list(range(12)) and targets[-1, -1] == 12


def test_text_batches_depend_on_seed_and_epoch_alone():
    def content(seed, epoch):
        torch.rand(seed + epoch)  # the global generator plays no part
        return windows(TextBatches(torch.arange(90), 4, 3, device=CPU, train=True, seed=seed), epoch)[0]

    assert torch.equal(content(1, 2), content(1, 2))
    assert not torch.equal(content(1, 2), content(1, 3))
    assert not torch.equal(content(1, 2), content(2, 2))


def test_text_batches_shift_windows_from_epoch_to_epoch():
    batches = TextBatches(torch.arange(90), 4, 3, device=CPU, train=True)
    shifts = {int(windows(batches, epoch)[0][0, 0]) % 4 for epoch in range(50)}
    assert shifts == {0, 1, 2, 3}  # one is missing with probability 4 * 0.75**50, about 2e-6


@pytest.mark.parametrize(("length", "train"), [(7, True), (4, False)])
def test_text_batches_refuse_a_text_shorter_than_a_window(length, train):
    with pytest.raises(RecipeError, match=rf"--context 4 needs at least {length + 1} characters.*there are {length};"):
        TextBatches(torch.arange(length), 4, 2, device=CPU, train=train)
    assert len(TextBatches(torch.arange(length + 1), 4, 2, device=CPU, train=train)) == 1
