import pytest
import torch

from benchmarks.qat import main, variants
from benchmarks.qat_nets import NETS
from benchmarks.training_step import kept_bytes
from recipes.policy_names import named_policy

QUICK = ("conv", "mobile", "vit", "llm")
TWO_BITS = named_policy("StochBackward2bit")


@pytest.mark.parametrize(
    "net", [pytest.param(net, marks=() if net in QUICK else pytest.mark.exhaustive) for net in NETS]
)
def test_variants_compute_the_same_and_keep_less(net):
    batch = NETS[net]._replace(size=32).batch(2)
    made = variants(net, [TWO_BITS], batch)
    assert torch.equal(made["Brevitas"](batch), made["StochBackward2bit"](batch))
    kept = {name: kept_bytes(model, batch) for name, model in made.items()}
    assert kept["StochBackward2bit"] < kept["Brevitas"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("net", ["conv", "mobile", "vit"])
def test_two_bits_keep_a_third_of_float(net):
    images = torch.randn(4, 3, 16, 16)
    made = variants(net, [TWO_BITS], images)
    kept = {name: kept_bytes(model, images) for name, model in made.items()}
    assert kept["StochBackward2bit"] < kept["float"] / 3 < kept["Brevitas"] / 3


def test_conv_net_keeps_a_sixteenth_of_stock_brevitas():
    images = torch.randn(4, 3, 32, 32)
    made = variants("conv", [TWO_BITS, named_policy("DEFAULT")], images)
    kept = {name: kept_bytes(model, images) for name, model in made.items()}
    assert 16 * kept["StochBackward2bit"] <= 16 * kept["DEFAULT"] <= kept["Brevitas"]


@pytest.mark.exhaustive
def test_main_prints_a_row_for_each_variant(capsys):
    main(["--nets", "conv", "--batch-size", "1", "--rounds", "1", "--policies", "StochBackward2bit"])
    header, *rows = [line.split() for line in capsys.readouterr().out.splitlines()[-4:]]
    assert [row[header.index("trains")] for row in rows] == ["float", "Brevitas", "StochBackward2bit"]
