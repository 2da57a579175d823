"""Policies: rules that models of one kind share, saved and loaded; and the shipped ones."""

from __future__ import annotations

import functools
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn
from torch.nn import functional as F

from brevact.autograd.region.settings import BackwardSettings, bits_of
from brevact.injectors import DitherBackward2bit, DitherBackward3bit, DitherBackward4bit, DitherBackward6bit
from brevact.injectors.resolve import BackwardQuantizer
from brevact.policy import files as policy_files
from brevact.policy.fit_report import FitReport
from brevact.policy.predicates import CONVS, FEW, MANY, is_norm, is_rectified, is_rectified_and_costly, is_separable
from brevact.policy.rules import assignment_of, block_assignment, check_rules, ops_of, quantizer_text
from brevact.quantizers.brief import brief
from brevact.tables import text_table
from brevact.version import __version__


@dataclass(frozen=True)
class Policy:
    """Ordered rules that assign backward quantizers to the parts of a model; not every rule has to match.

    ``print(policy)`` shows a table of the rules, and a fitted policy's measured bytes and noise.

    >>> import torch.nn as nn, torch.nn.functional as F, brevact
    >>> finer = brevact.Policy({nn.LayerNorm: brevact.StochBackward4bit, nn.RMSNorm: brevact.StochBackward4bit,
    ...                         F.cross_entropy: brevact.StochBackward8bit})
    >>> model = brevact.quantize_backward(nn.Sequential(nn.LayerNorm(8)), finer)
    >>> print(finer)
    rule           for   bits  backward quantizer
    ---------------------------------------------------------------------------
    LayerNorm      type  4     StochBackward4bit: UniformQuantizer, bit_width=4
    RMSNorm        type  4     StochBackward4bit: UniformQuantizer, bit_width=4
    cross_entropy  op    8     StochBackward8bit: UniformQuantizer, bit_width=8

    Args:
        rules: mapping from module types, torch functions, names or predicates to backward quantizers, as in
            :func:`brevact.quantize_backward`. Unlike there, rules may match nothing, if at least one matches.
        layers: types of the modules that the policy was fitted for, by name; other models raise an error. None for any
            model.
        report: bytes and noise that :func:`brevact.fit` measured; None for a policy that was not fitted.
        required: keys of the rules that must match: those added by :meth:`let`. Not saved in files.

    Raises:
        TypeError: ``rules`` is no mapping, one of its keys no rule, one of its values no backward quantizer.
        ValueError: there are no rules.
    """

    rules: Mapping[Any, BackwardQuantizer | None]
    layers: Mapping[str, str] | None = None
    report: FitReport | None = field(default=None, compare=False)
    required: Collection[Any] = field(default=(), compare=False, repr=False)

    def __post_init__(self) -> None:
        check_rules(self.rules, "rules")
        for key, source in self.rules.items():
            assignment_of(key, source)

    def __eq__(self, other: object) -> bool:
        """Whether rules and layers are the same, in the same order; results of ``let`` compare by settings."""
        if not isinstance(other, Policy):
            return NotImplemented
        if self.layers != other.layers or list(self.rules) != list(other.rules):
            return False
        return all(self.has_rule_of(other, key) for key in self.rules)

    def has_rule_of(self, other: Policy, key: Any) -> bool:
        if key not in self.rules:
            return False
        mine, theirs = self.rules[key], other.rules[key]
        return mine == theirs or assignment_of(key, mine).settings == assignment_of(key, theirs).settings

    @functools.cached_property
    def settings_of_block(self) -> BackwardSettings | None:
        """Settings of a block of code, resolved once; rules of the shipped policies for modules do not matter there."""
        shipped = {key for each in (DEFAULT, RECOMPUTE) for key in each.rules if self.has_rule_of(each, key)}
        return block_assignment(self.rules, shipped).settings

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "settings_of_block"}

    def let(self, rules: Mapping[Any, BackwardQuantizer | None]) -> Policy:
        """Return a policy with these rules before its own; the first match wins.

        Each of them must match something, as in a mapping.

        >>> import brevact, torch.nn as nn
        >>> policy = brevact.TRANSFORMER.let({nn.Embedding: None, "head": brevact.StochBackward8bit})
        >>> print(policy)
        rule           for       bits  backward quantizer
        ---------------------------------------------------------------------------------------------------
        Embedding      type      -     full precision
        'head'         name      8     StochBackward8bit: UniformQuantizer, bit_width=8
        is_norm        function  4     DitherBackward4bit: UniformQuantizer, bit_width=4, rounding=dithered
        cross_entropy  op        4     DitherBackward4bit: UniformQuantizer, bit_width=4, rounding=dithered
        '*'            name      2     DitherBackward2bit: UniformQuantizer, bit_width=2, rounding=dithered

        Args:
            rules: as in a policy; a rule replaces this policy's rule for the same key.

        Raises:
            TypeError: ``rules`` is no mapping, one of its keys no rule, one of its values no backward quantizer.
            ValueError: there are no rules.
        """
        check_rules(rules, "rules")
        rest = {key: source for key, source in self.rules.items() if key not in rules}
        required = [*rules, *(key for key in self.required if key in rest)]
        return Policy({**rules, **rest}, self.layers, required=required)

    def __str__(self) -> str:
        rows = []
        for key, source in self.rules.items():
            found = assignment_of(key, source)
            bits = 0 if found.settings is None else bits_of(found.settings.quantizer)
            rows.append((found.rule, _kind_of(key), str(bits or "-"), quantizer_text(found)))
        table = text_table(("rule", "for", "bits", "backward quantizer"), rows)
        return table if self.report is None else f"{table}\n\n{self.report.summary}"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the policy as JSON, with the version of the package.

        Rules for names, for types of torch.nn, brevitas.nn and brevact.nn, for torch functions and for the functions of
        ``brevact.policy.predicates`` can be saved, with backward quantizers of brevact and their settings.

        >>> import brevact, tempfile, os
        >>> path = os.path.join(tempfile.mkdtemp(), "policy.json")
        >>> brevact.CONV_NET.save(path)
        >>> brevact.Policy.load(path) == brevact.CONV_NET
        True

        Args:
            path: file to write.

        Raises:
            TypeError: a rule is a function of yours or a type of another library; a quantizer, or one of its settings,
                is a class or an object of your own. No file is written.
        """
        Path(path).write_text(self.to_json(), encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Policy:
        """Return the policy that :meth:`save` wrote. Names in the file are looked up in closed lists: it runs no code.

        Args:
            path: file to read.

        Raises:
            OSError: there is no such file.
            ValueError: it holds no policy, or unknown fields, types, functions, quantizers or settings.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{os.fspath(path)} holds no policy: {error}; Policy.save writes one") from error
        return cls(*policy_files.read(text, os.fspath(path), __version__))

    def to_json(self) -> str:
        """Return the text that :meth:`save` writes, for a checkpoint; raises the errors of :meth:`save`.

        >>> import brevact
        >>> brevact.Policy.from_json(brevact.DEFAULT.to_json()) == brevact.DEFAULT
        True
        """
        return policy_files.written(self.rules, self.layers, self.report, __version__)

    @classmethod
    def from_json(cls, text: str) -> Policy:
        """Return the policy that :meth:`to_json` wrote; runs no code from the text.

        Args:
            text: JSON.

        Raises:
            TypeError: it is no text.
            ValueError: it holds no policy, or unknown fields, types, functions, quantizers or settings.
        """
        if not isinstance(text, str):
            raise TypeError(f"text: got {brief(text)} of type {type(text).__name__}; accepted is what to_json returned")
        return cls(*policy_files.read(text, "text", __version__))


def _kind_of(key: Any) -> str:
    if isinstance(key, str):
        return "name"
    if ops_of(key):
        return "op"
    return "type" if isinstance(key, type | tuple) else "function"


DEFAULT = Policy(
    {
        is_separable: DitherBackward6bit.let(score_bit_width=6, recompute=FEW),
        F.cross_entropy: DitherBackward6bit,
        is_rectified: DitherBackward3bit,
        "": DitherBackward4bit.let(score_bit_width=5),
    }
)
"""Default policy of models and blocks: 3 to 6 bits, dithered rounding.

Batch-normalized networks of depthwise convolutions (``is_separable``) recompute layers of up to 128 multiplications per
element and save 6 bits. Other models save 3 bits in modules whose only activation functions are piecewise linear
(``is_rectified``), whose chains are unbiased at any width, and 4 bits elsewhere, which smooth functions need. Query and
key, which are exponentiated, have 5 or more, a cross-entropy's probabilities 6.
"""

RECOMPUTE = Policy(
    {
        F.cross_entropy: DitherBackward6bit.let(recompute=MANY),
        is_rectified_and_costly: DitherBackward4bit.let(recompute=MANY),
        "": DitherBackward6bit.let(score_bit_width=6, recompute=MANY),
    }
)
"""Policy of fewer bytes and longer steps: layers of up to 1,024 multiplications per element are recomputed.

The rest is saved at 6 bits, or at 4 in rectified models with few cheap layers (``is_rectified_and_costly``), where
``DEFAULT`` saves 3. A cross-entropy's probabilities have 6 in all models.
"""

CONV_NET = Policy({(*CONVS, nn.Linear): DitherBackward3bit, is_norm: DitherBackward3bit, "*": DitherBackward2bit})
"""Policy for convolutional networks: layers with weights, and norms, at 3 bits; derivatives and the rest at 2."""

TRANSFORMER = Policy({is_norm: DitherBackward4bit, F.cross_entropy: DitherBackward4bit, "*": DitherBackward2bit})
"""Policy for transformers: norms, which read the residual stream's outliers, and losses at 4 bits, the rest at 2."""
