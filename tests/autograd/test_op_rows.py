"""The rows of ops: docs/how.md lists them, each counterpart states its saved tensors, and no two rows disagree."""

from __future__ import annotations

from brevact.autograd.ops import OPS
from scripts.stored_table import PAGE, with_table


def test_the_documentation_has_the_table_of_the_rows():
    page = PAGE.read_text("utf-8")
    assert with_table(page) == page, "run python -m scripts.stored_table"


def test_counterparts_say_what_they_store():
    assert [op.functions for op in OPS if op.handler is not None and op.stored is None] == []


def test_a_function_has_one_counterpart_and_one_kind():
    for field in ("handler", "saves", "must_not_round"):
        functions = [func for op in OPS if getattr(op, field) is not None for func in set(op.functions)]
        assert len(functions) == len(set(functions)), field
