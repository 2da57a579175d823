"""The studies: what each one asks, where the question is from, and which runs answer it."""

from dataclasses import replace
from typing import Any

from recipes.study.cases import DEFAULT, REFERENCE, Case, Study, uniform
from recipes.study.run import FULL_PRECISION, Size

THESIS = "J. Li, master's thesis, Heidelberg University, 2025"
LPBN = "B. Graham, arXiv:1702.08231, table 3"
#: Of the thesis' figures; 32 bits are full precision.
WIDTHS = (1, 2, 3, 4, 5, 6, 7, 8, 16)
BUCKET_SIZES = (64, 128, 256, 512, None)
FORMATS = ("L2", "L3", "L4", "L5", "U4", "U5", "U8", "O4")
STAGES = ("stem", *(f"blocks.{index}" for index in range(6)), "head")
#: The optimizer that the thesis calls unoptimized, but for its warm-up.
_PLAIN: dict[str, Any] = {"schedule": "constant", "weight_decay": 0.0}
_STRATEGIES: dict[str, dict[str, Any]] = {
    "schedule": {"schedule": "cosine"},
    "weight decay": {"weight_decay": 0.05},
    "clipping": {"clip_grad_norm": 1.0},
    "label smoothing": {"label_smoothing": 0.05},
}
#: Section 6.3 of the thesis.
_LONG = (("batch_size", 128), ("clip_grad_norm", 1.0), ("lr", 0.001))

_STOCH_2, _STOCH_4 = uniform("Stoch", 2), uniform("Stoch", 4)
_NEAREST_4 = uniform("Nearest", 4)
_FIT = Case("fit, bytes of DEFAULT", "fit:bytes=DEFAULT")
_ADAPTIVE = Case("Adaptive, bytes of DEFAULT", "DEFAULT@adaptive:100")


def _bucket_case(bits: int, size: int | None) -> Case:
    """The case with buckets of a size; the run of 512, the default, is that without the setting."""
    changed = uniform("Stoch", bits) if size == 512 else uniform("Stoch", bits, bucket_size=size)
    return replace(changed, label=f"{bits} bits, {'whole tensor' if size is None else f'buckets of {size}'}")


def _bucket_sizes(bits: int, figure: str) -> Study:
    cases = {size: _bucket_case(bits, size) for size in BUCKET_SIZES}
    return Study(
        f"bucket-sizes-{bits}bit",
        f"What do smaller buckets gain at {bits} bits?",
        f"{THESIS}, figure {figure}",
        (REFERENCE, *cases.values()),
        tuple((cases[size].label, cases[512].label) for size in BUCKET_SIZES if size != 512),
    )


def _formats(name: str, question: str, suffix: str, source: str) -> Study:
    cases = (Case(f"{each}, batch norms", f"{FULL_PRECISION}+norms={each}{suffix}") for each in FORMATS)
    return Study(name, question, source, (REFERENCE, *cases))


def _strategy(label: str, policy: str, **changes: Any) -> Case:
    return Case(label, policy, tuple(sorted({**_PLAIN, **changes}.items())))


def _strategies() -> Study:
    policy, baseline = "NearestBackward7bit", "7 bits, warm-up alone"
    alone = [_strategy(f"7 bits, {name}", policy, **changes) for name, changes in _STRATEGIES.items()]
    together = {name: value for changes in _STRATEGIES.values() for name, value in changes.items()}
    return Study(
        "strategies",
        "Which of four strategies, each with warm-up, makes training at 7 bits stable?",
        f"{THESIS}, figure 4.3",
        (
            _strategy("full precision, warm-up alone", FULL_PRECISION),
            _strategy(baseline, policy),
            *alone,
            _strategy("7 bits, all four", policy, **together),
        ),
        tuple((case.label, baseline) for case in alone),
        note="With label smoothing the training loss is a different function: compare test accuracy there.",
    )


def _long(name: str, title: str, recipe: str, **changes: Any) -> Study:
    cases = (REFERENCE, _STOCH_2, DEFAULT)
    settings = tuple(sorted((*_LONG, *changes.items())))
    return Study(
        f"long-{name}",
        f"Does {title}, trained for 50 epochs on all images, end the same by default?",
        f"{THESIS}, section 6.3",
        tuple(replace(case, recipe=recipe, changes=settings) for case in cases),
        size=Size(epochs=50, train_size=None),
        is_long=True,
    )


_ALL = (
    Study(
        "main",
        "Does training by default, at a thirtieth of the bytes, end where training at full precision does?",
        "this project",
        (REFERENCE, DEFAULT),
        seeds=12,
        size=Size(),
    ),
    Study(
        "recompute",
        "Does training with recomputed layers, at an eightieth of the bytes, end where full precision does?",
        "this project",
        (REFERENCE, Case("RECOMPUTE", "RECOMPUTE")),
        seeds=12,
        size=Size(),
    ),
    Study(
        "main-2bit",
        "What do 2 bits for each tensor cost where the main study trains?",
        "this project",
        (REFERENCE, _STOCH_2),
        seeds=8,
        size=Size(),
    ),
    Study(
        "rounding",
        "Is stochastic rounding better than rounding to nearest at 2 and at 4 bits, and dithered rounding than both?",
        f"{THESIS}, figure 5.2; of dithered rounding, this project",
        (REFERENCE, *(uniform(rounding, bits) for bits in (2, 4) for rounding in ("Nearest", "Stoch", "Dither"))),
        tuple(
            (uniform(better, bits).label, uniform(worse, bits).label)
            for bits in (2, 4)
            for better, worse in (("Stoch", "Nearest"), ("Dither", "Stoch"), ("Dither", "Nearest"))
        ),
    ),
    Study(
        "rounding-2bit-longer",
        "Is stochastic rounding better than rounding to nearest at 2 bits where training takes five times the steps?",
        f"{THESIS}, figure 5.2",
        (REFERENCE, *(uniform(rounding, 2) for rounding in ("Nearest", "Stoch", "Dither"))),
        ((_STOCH_2.label, uniform("Nearest", 2).label), (uniform("Dither", 2).label, _STOCH_2.label)),
        size=Size(),
    ),
    Study(
        "derived",
        "Does deriving tensors from one packed tensor a chain cost accuracy?",
        "this project",
        (
            REFERENCE,
            _STOCH_4,
            Case("4 bits, nothing derives", f"{_STOCH_4.policy}:derive_min_bits=0"),
            uniform("Stoch", 8),
        ),
        ((_STOCH_4.label, "4 bits, nothing derives"),),
        size=Size(epochs=4),
    ),
    Study(
        "bit-widths-stochastic",
        "How many bits does stochastic rounding need?",
        f"{THESIS}, figure 5.1",
        (REFERENCE, *(uniform("Stoch", bits) for bits in WIDTHS)),
    ),
    Study(
        "bit-widths-nearest",
        "How many bits does rounding to nearest need?",
        f"{THESIS}, figure 4.1",
        (REFERENCE, *(uniform("Nearest", bits) for bits in WIDTHS)),
    ),
    Study(
        "fitted",
        "Do widths that are fitted, or that follow the training, do better than DEFAULT at its bytes?",
        "this project",
        (REFERENCE, DEFAULT, _FIT, _ADAPTIVE),
        ((_FIT.label, DEFAULT.label), (_ADAPTIVE.label, DEFAULT.label)),
    ),
    _formats(
        "formats", "Which formats of batch norms, read by the forward pass too, train as well?", "ForwardBackward", LPBN
    ),
    Study(
        "weibull",
        "Are levels fitted to a Weibull distribution better than evenly spaced ones?",
        "Fu et al., Don't Waste Your Bits! (TinyScript), ICML 2020, table 1",
        (
            REFERENCE,
            *(uniform("Stoch", bits) for bits in (2, 3, 4)),
            *(Case(f"{bits} bits, Weibull", f"WeibullBackward{bits}bit") for bits in (2, 3, 4)),
        ),
        tuple((f"{bits} bits, Weibull", f"{bits} bits, stochastic") for bits in (2, 3, 4)),
    ),
    Study(
        "dual-precision",
        "Is a pooled map in float16 with residuals at 2 bits better than 2 bits alone?",
        "DIVISION, arXiv:2208.04187, figure 6 (c)",
        (
            REFERENCE,
            _STOCH_2,
            *(Case(f"{bits} bits, dual precision", f"DualPrecisionBackward{bits}bit") for bits in (2, 4)),
        ),
        (("2 bits, dual precision", _STOCH_2.label),),
    ),
    _bucket_sizes(2, "5.3"),
    _bucket_sizes(4, "5.4"),
    Study(
        "mixtures",
        "What do buckets of 4 bits among those of 2 gain, by their probability?",
        f"{THESIS}, figure 5.5",
        (
            REFERENCE,
            _STOCH_2,
            *(Case(f"4 bits with p={p}", f"StochBackward2bit4bitMix:mix_prob={p}") for p in (0.2, 0.5, 0.8)),
            Case("p from 0.8 to 0.2", "StochBackward2bit4bitMix:mix_prob=0.8@linear:0.8:0.2"),
            _STOCH_4,
        ),
        (("p from 0.8 to 0.2", "4 bits with p=0.5"),),
    ),
    Study(
        "stages",
        "Which stage of the network suffers most from 4 bits, all others at full precision?",
        f"{THESIS}, figure 4.4",
        (
            REFERENCE,
            *(Case(stage, f"{FULL_PRECISION}+{stage}*={_NEAREST_4.policy}") for stage in STAGES),
            _NEAREST_4,
        ),
    ),
    _strategies(),
    Study(
        "qat",
        "Does quantization-aware training at 4 bits lose by storing less?",
        "this project",
        tuple(
            Case(label, policy, recipe="qat")
            for label, policy in (
                ("W4A4, stock Brevitas", FULL_PRECISION),
                ("W4A4, lossless", "LosslessBackward"),
                ("W4A4, DEFAULT", "DEFAULT"),
            )
        ),
    ),
    _formats(
        "formats-backward",
        "Which formats of batch norms, read by the backward pass alone, train as well?",
        "Backward",
        "this project",
    ),
    _long("efficientnetv2-s", "EfficientNetV2-S", "efficientnetv2", model="s"),
    _long("resnet50", "ResNet-50", "resnet50"),
)
#: By name, in the order in which all of them are run.
STUDIES: dict[str, Study] = {study.name: study for study in _ALL}
