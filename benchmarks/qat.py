"""Quantization-aware training with Brevitas: bytes and time in float, by stock Brevitas, and by brevact.

    python -m benchmarks.qat                      # seven nets; add --csv to append the rows to a file
    python -m benchmarks.qat --nets conv --batch-size 8 --compile

Each net of `benchmarks.qat_nets` as plain PyTorch layers, as Brevitas layers, compiled too with `--compile`, and as
these with `brevact.quantize_backward`. Scales of activations are learned: past the steps that collect statistics, if
`--collecting` does not ask for those. Kept bytes are those of `memory_report`; the peak is what PyTorch allocates at
most in a step above its start. Steps take turns in one process, whose heap is thus the same for all, by default with
one thread, whose processor time is counted: what other processes take does not enter. Times are medians, and ratios
medians of the ratios of a round.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from benchmarks.qat_nets import COLLECTED, NETS, Layers
from benchmarks.records import write_rows
from benchmarks.training_step import alternate, kept_bytes, loss_of
from brevact.reports.peak import peak_of
from recipes.policy_names import NamedPolicy, named_policy

_MIB = 2**20
POLICIES = ("LosslessBackward", "LosslessBackward:residual_bit_width=2", "StochBackward2bit", "DEFAULT")


def variants(
    net: str, policies: Sequence[NamedPolicy], batch: Tensor, *, collecting: bool = False
) -> dict[str, nn.Module]:
    """The net in float, by stock Brevitas and with backward quantization, after the steps that collect statistics.

    Args:
        net: one of `NETS`.
        policies: of backward quantizers.
        batch: inputs to collect statistics of.
        collecting: whether statistics are still collected.

    Returns:
        Models by name.
    """
    made = {}
    for name in ("float", "Brevitas", *(policy.name for policy in policies)):
        torch.manual_seed(0)
        made[name] = NETS[net].make(Layers(None if name == "float" else NETS[net].bit_width, collecting))
        with torch.no_grad():
            for _ in range(COLLECTED if collecting else NETS[net].collected):
                made[name](batch)
    for policy in policies:
        policy.apply(made[policy.name])
    return made


def _compiled(model: nn.Module, batch: Tensor, labels: Tensor) -> Callable[[Tensor], Tensor] | None:
    """A compiled model that has run a step; None where it does not compile."""
    run = torch.compile(model)
    try:
        nn.functional.cross_entropy(run(batch), labels).backward()
    except Exception as error:  # the compiler's, of whatever kind
        print(f"stock Brevitas does not compile: {type(error).__name__}: {str(error).splitlines()[0][:100]}")
        return None
    return run


def measure(net: str, args: argparse.Namespace) -> list[dict[str, object]]:
    """Rows of one net: a variant each."""
    torch.manual_seed(0)
    batch_size = args.batch_size or NETS[net].batch_size
    batch, labels = NETS[net].batch(batch_size), torch.randint(0, 10, (batch_size,))
    models = variants(net, args.policies, batch, collecting=args.collecting)
    kept: dict[str, float] = {name: kept_bytes(model, batch) for name, model in models.items()}
    runs: dict[str, Callable[[Tensor], Tensor]] = {**models}
    if args.compile and (compiled := _compiled(models["Brevitas"], batch, labels)) is not None:
        runs["compiled"] = compiled

    def step(name: str) -> tuple[float, float]:
        owner = models.get(name, models["Brevitas"])
        owner.zero_grad()
        start = time.process_time()
        loss = loss_of(runs[name], batch, labels)  # type: ignore[arg-type]
        middle = time.process_time()
        loss.backward()
        return middle - start, time.process_time() - start

    peaks = {name: peak_of(lambda name=name: step(name), torch.device("cpu")) for name in runs}  # type: ignore[misc]
    found = alternate({name: lambda name=name: step(name) for name in runs}, args.rounds, 3)  # type: ignore[misc]
    steps = {name: [each[1] for each in times] for name, times in found.items()}

    def ratio(name: str, other: str) -> float:
        return round(statistics.median(a / b for a, b in zip(steps[name], steps[other], strict=True)), 3)

    return [
        {
            "net": net,
            "bit_width": NETS[net].bit_width,
            "batch": batch_size,
            "size": NETS[net].size,
            "trains": name,
            "kept_mib": round(kept[name] / _MIB, 2) if name in kept else "",
            "of_float": round(kept[name] / kept["float"], 3) if name in kept else "",
            "brevitas_ratio": round(kept["Brevitas"] / kept[name], 1) if name in kept else "",
            "peak_mib": round(peaks[name] / _MIB, 1),
            "forward_ms": round(statistics.median(each[0] for each in found[name]) * 1e3, 1),
            "step_ms": round(statistics.median(steps[name]) * 1e3, 1),
            "step_to_brevitas": ratio(name, "Brevitas"),
            "step_to_float": ratio(name, "float"),
        }
        for name in runs
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nets", nargs="+", choices=NETS, default=list(NETS))
    default = [named_policy(name) for name in POLICIES]
    parser.add_argument("--policies", nargs="+", type=named_policy, default=default, metavar="POLICY")
    parser.add_argument("--batch-size", type=int, help="default: 32, 16 or 8, by net")
    parser.add_argument("--collecting", action="store_true", help="while scales come from statistics")
    parser.add_argument("--compile", action="store_true", help="stock Brevitas by torch.compile, too")
    parser.add_argument("--threads", type=int, default=1, help="with more, waiting for each other counts as well")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--csv", help="append the rows to this file")
    args = parser.parse_args(arguments)
    torch.set_num_threads(args.threads)
    for net in args.nets:
        write_rows(measure(net, args), args.csv)


if __name__ == "__main__":
    main()
