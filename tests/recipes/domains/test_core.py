"""What the recipes of fields share, on a recipe without a library of its own."""

import argparse
import dataclasses
import statistics

import pytest
import torch

import brevact
from recipes.domains import Domain, library, run_command_line
from recipes.domains.command_line import variant_of
from recipes.domains.processes import Case, case_of, fitting_size
from recipes.domains.variants import prepare
from recipes.errors import RecipeError
from recipes.files import read_rows
from tests.recipes.domains.tiny import DOMAIN, Net, TinySettings, TinyTask, main
from tests.recipes.running import PNG, interrupted_at_forward

#: A step of the tiny model is too small for the default's smallest packed tensor.
POLICY = "StochBackward4bit:min_numel=0"
VARIANTS = ["plain", "checkpoint", POLICY, "LosslessBackward"]
COMMAND = ["--variants", *VARIANTS, "--seeds", "0", "1"]


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    rows = folder / "rows.csv"
    assert main([*COMMAND, "--rounds", "1", "--out-dir", str(folder / "runs"), "--csv", str(rows)]) == 0
    return folder / "runs", rows


def without_time(path):
    times = {"seconds", "time"}
    return [{key: value for key, value in row.items() if key not in times} for row in read_rows(path)]


def values_of(folder):
    return {(row["variant"], int(row["seed"])): float(row["value"]) for row in read_rows(folder / "runs.csv")}


def test_main_measures_and_trains_each_variant(whole_run):
    folder, csv = whole_run
    names = {path.name for path in folder.iterdir()}
    pictures = {"tiny-plain.png", "tiny-checkpoint.png", "tiny-LosslessBackward.png"}
    assert pictures < names and (folder / "tiny-plain.png").read_text() == "4 steps"
    assert {"runs.csv", "epochs.csv", "measured.csv", "table.csv", "settings.json"} < names
    assert "checkpoint.pt" not in names
    assert all((folder / name).read_bytes().startswith(PNG) for name in ("curves.png", "memory.png"))
    table = read_rows(folder / "table.csv")
    assert table == read_rows(csv) and [row["variant"] for row in table] == VARIANTS
    plain, checkpoint, packed, lossless = (float(row["kept_mib"]) for row in table)
    assert checkpoint < plain and lossless < plain and packed < 0.5 * plain
    assert all(float(row["peak_mib"]) > float(row["loaded_mib"]) > 50 for row in table)
    assert float(table[0]["step_ratio"]) == float(table[0]["kept_less"]) == 1


def test_trainings_of_a_seed_are_paired(whole_run):
    values = values_of(whole_run[0])
    for seed in (0, 1):
        plain, checkpoint, packed, lossless = (values[variant, seed] for variant in VARIANTS)
        assert plain == checkpoint == lossless != packed
    row = read_rows(whole_run[0] / "table.csv")[2]
    differences = [values[POLICY, seed] - values["plain", seed] for seed in (0, 1)]
    rounding = 1e-9  # of values below 1 in files, to nine digits
    assert float(row["difference"]) == pytest.approx(statistics.mean(differences), abs=rounding)
    assert float(row["difference_se"]) == pytest.approx(statistics.stdev(differences) / 2**0.5, abs=rounding)


def test_main_prints_the_table_of_what_was_asked_for(whole_run, capsys):
    folder, _ = whole_run
    assert main(["--variants", POLICY, "--seeds", "0", "1", "--rounds", "1", "--out-dir", str(folder), "--resume"]) == 0
    output = capsys.readouterr().out
    assert "x less)" in output and " ± " in output and "LosslessBackward" not in output
    header, plain, packed = output.splitlines()[:3]
    assert (
        header.startswith("width 64")
        and header.endswith(" error - plain")
        and plain.startswith("plain ")
        and packed.startswith(POLICY)
    )


# A run takes two forward passes to train and one to test in an epoch; those of checkpoints are as many.
@pytest.mark.parametrize("number", [2, 5, 11])
def test_main_resumes_an_interrupted_training_to_the_same_result(whole_run, tmp_path, number):
    command = [*COMMAND, "--rounds", "0", "--out-dir", str(tmp_path)]
    with interrupted_at_forward(Net, number):
        assert main(command) == 130
    assert main([*command, "--resume"]) == 0
    for name in ("runs.csv", "epochs.csv"):
        assert without_time(tmp_path / name) == without_time(whole_run[0] / name)
    assert (tmp_path / "tiny-plain.png").read_text() == "4 steps"


@pytest.mark.exhaustive
def test_main_without_seeds_measures_alone(tmp_path, capsys):
    command = ["--variants", "plain", "--rounds", "1", "--seeds", "--out-dir", str(tmp_path)]
    assert main(command) == 0
    assert "plain, round 1: kept" in capsys.readouterr().out and not (tmp_path / "runs.csv").exists()
    assert main([*command, "--resume"]) == 0
    assert "round 1" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--width", "1"], "--width 1 is not possible: use at least 8"),
        (["--lr", "0"], "--lr 0.0 is not possible: use a value above 0"),
        (["--device", "nowhere"], "--device nowhere cannot be used here"),
        (["--memory", "much"], "--memory much is not possible: use a size such as 2GiB or 1536MiB"),
        (["--resume"], "no runs to resume: there is no"),
        (["--lr", "1e30", "--rounds", "0", "--variants", "plain"], "the training loss became"),
    ],
)
def test_main_says_what_to_do_and_exits_with_2(tmp_path, capsys, arguments, message):
    assert main([*arguments, "--out-dir", str(tmp_path / "runs")]) == 2
    error = capsys.readouterr().err
    assert message in error and error.splitlines()[-1].startswith("error: ")


def test_a_variant_may_be_checkpoints_and_a_policy():
    task = TinyTask(TinySettings(), 0, torch.device("cpu"))
    region = prepare(task, variant_of(f"checkpoint+{POLICY}"))
    assert task.model.checkpointed and "StochBackward4bit" in str(brevact.backward_policy(task.model))
    task.step(next(task.batches(1)), region)
    with pytest.raises(argparse.ArgumentTypeError, match=r"^nothing is not a backward quantizer or policy"):
        variant_of("checkpoint+nothing")


def test_main_refuses_an_unknown_variant(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["--variants", "checkpoints"])
    assert "None is full precision" in capsys.readouterr().err


def test_main_keeps_runs_with_other_settings_apart(whole_run, capsys):
    folder, _ = whole_run
    assert main(["--out-dir", str(folder)]) == 2
    assert "already holds runs; go on with --resume" in capsys.readouterr().err
    assert main(["--out-dir", str(folder), "--resume", "--epochs", "3"]) == 2
    assert "have other settings (--epochs)" in capsys.readouterr().err


@pytest.mark.exhaustive
def test_main_measures_at_another_size(tmp_path, capsys):
    command = ["--variants", "plain", "--rounds", "1", "--seeds", "--out-dir", str(tmp_path)]
    assert main([*command, "--measured-width", "32"]) == 0
    assert main([*command, "--measured-width", "128", "--resume"]) == 0
    small, large = (row for row in read_rows(tmp_path / "measured.csv"))
    assert (small["size"], large["size"]) == ("32", "128")
    assert float(small["kept_mib"]) < float(large["kept_mib"])
    (row,) = read_rows(tmp_path / "table.csv")
    assert (row["measured_at"], float(row["kept_mib"])) == ("128", float(large["kept_mib"]))
    assert "\nwidth 128 " in capsys.readouterr().out


def test_main_says_what_to_install(tmp_path, capsys):
    lacking = dataclasses.replace(DOMAIN, libraries=("torch", "no_such_library"))
    assert run_command_line(lacking, ["--out-dir", str(tmp_path / "runs")]) == 2
    assert capsys.readouterr().err == (
        "error: no_such_library cannot be imported; install by pip install '.[domains]'\n"
    )
    assert not (tmp_path / "runs").exists()
    with pytest.raises(RecipeError, match="no_such_library cannot be imported"):
        library("no_such_library.losses")


@pytest.mark.exhaustive
def test_the_largest_size_fits_and_the_next_does_not():
    settings, device = TinySettings(batch_size=256), torch.device("cpu")
    smallest = case_of(DOMAIN, settings, "plain", device).run()["peak_mib"]
    limit, lines = int(smallest) + 200, []
    found = fitting_size(DOMAIN, settings, "plain", device, limit, lines.append)
    assert found["size"] % 512 == 0 and smallest < found["peak_mib"] <= limit
    assert f"plain, width {found['size']}: {found['peak_mib']:.0f} MiB, fits" in lines
    failing = [int(line.split(":")[0].split()[-1]) for line in lines if line.endswith("does not fit")]
    assert min(failing) == found["size"] + 512


def test_a_process_ends_in_the_step_in_which_it_crosses_its_limit():
    case = case_of(DOMAIN, TinySettings(), "plain", torch.device("cpu"))
    assert dataclasses.replace(case, steps=10**9, limit_mib=20).run(timeout=120)["peak_mib"] > 20


def test_memory_that_is_reserved_and_not_resident_counts_as_free():
    case = case_of(DOMAIN, TinySettings(reserved=2048), "plain", torch.device("cpu"))
    assert dataclasses.replace(case, limit_mib=1024).run()["peak_mib"] < 1024


@pytest.mark.exhaustive
def test_main_says_how_much_memory_the_smallest_size_takes(tmp_path, capsys):
    command = ["--rounds", "0", "--seeds", "--variants", "plain", "--memory", "20MiB", "--out-dir", str(tmp_path)]
    assert main(command) == 2
    error = capsys.readouterr().err
    assert "--memory 20MiB is not possible: the smallest size, --width 512, takes plain " in error
    assert "; use --memory " in error


def test_a_failing_process_says_why():
    case = Case(module="no.such.module", variant="plain", settings={}, device="cpu", threads=1)
    assert "No module named 'no'" in case.run()["error"]


def test_domains_are_found_by_the_name_of_their_module():
    assert isinstance(DOMAIN, Domain) and DOMAIN.name == "tiny"
