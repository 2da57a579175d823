import pytest

from recipes.data.tokens import different_paragraphs, python_reference, read_text, split_paragraphs
from recipes.recipe import RecipeError


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


def test_held_out_paragraphs_of_the_reference_are_not_trained_on():
    train, test = split_paragraphs(different_paragraphs(python_reference()))
    trained_on, held_out = ({" ".join(each.split()) for each in text.split("\n\n")} for text in (train, test))
    assert len(held_out) > 100 and not trained_on & held_out and "statement" in train
    assert 0.09 < len(test) / (len(train) + len(test)) <= 0.1


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, r"--text-file .*text.txt cannot be read \(No such file"), (b"\xff\xfe", "is not a text in UTF-8")],
)
def test_read_text_refuses(tmp_path, content, message):
    if content is not None:
        (tmp_path / "text.txt").write_bytes(content)
    with pytest.raises(RecipeError, match=message):
        read_text(tmp_path / "text.txt")
