"""``python -m brevact plan``: its bytes are those of real steps."""

import re
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

import brevact
from brevact.command_line.main import main
from brevact.command_line.plan import BUDGETS, GIB, WAYS, Training, as_on_a_gpu, configuration, most

transformers = pytest.importorskip("transformers")
BATCH, SEQUENCE, BLOCKS = 2, 256, 4
TARGETS = ("q_proj", "v_proj", "gate_proj", "down_proj")


def small(**changes):
    sizes = {"vocab_size": 256, "hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": BLOCKS}
    return transformers.LlamaConfig(**sizes | changes, num_attention_heads=8, num_key_value_heads=4)


@pytest.fixture
def eager_alone(monkeypatch):
    for way in BUDGETS:
        monkeypatch.delitem(WAYS, way)


def real(rank, attention="sdpa", **changes):
    """A model, a batch and a loss."""
    model = transformers.LlamaForCausalLM(small(**changes))
    model.set_attn_implementation(attention)
    if rank:
        peft = pytest.importorskip("peft")
        model = peft.get_peft_model(model, peft.LoraConfig(r=rank, target_modules=list(TARGETS)))
    return model, torch.randint(256, (BATCH, SEQUENCE)), loss


def loss(model, ids):
    return model(input_ids=ids, labels=ids, use_cache=False).loss


def measured(rank):
    """Kept bytes and peaks of real steps, by way."""
    found, (model, ids, _) = {}, real(rank)
    for way in ("DEFAULT", "RECOMPUTE"):
        brevact.quantize_backward(model, WAYS[way])
        report, step = brevact.memory_report(model, ids, loss), brevact.step_report(model, ids, loss, rounds=2)
        found["plain"] = report.plain_bytes, step.plain_peak
        found[way] = report.saved_bytes, step.packed_peak
        brevact.restore_backward(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    if rank:
        model.enable_input_require_grads()
    report, step = brevact.memory_report(model, ids, loss), brevact.step_report(model, ids, loss, rounds=2)
    return found | {"checkpointed": (report.plain_bytes, step.plain_peak)}


@pytest.mark.parametrize("rank", [0, 8])
def test_planned_bytes_of_compiled_steps_are_within_a_tenth_of_those_of_a_real_step(rank):
    Training(small(), BATCH, SEQUENCE).model(1)  # registers attention without a mask, which compiled SDPA writes out
    model, *others = real(rank, "brevact_plan")
    training = Training(small(), BATCH, SEQUENCE, dtype=torch.float32, rank=rank, targets=TARGETS if rank else ())
    for way, budget in BUDGETS.items():
        torch.compiler.reset()
        kept = brevact.memory_report(brevact.compile(model, budget=budget, backend="aot_eager"), *others).saved_bytes
        with as_on_a_gpu():
            planned = training.allocated(way)
        assert abs(planned.kept - kept) < 0.1 * kept, way


@pytest.mark.exhaustive
def test_planned_peak_of_a_compiled_step_is_that_of_inductor_where_activations_make_it():
    sizes = {"vocab_size": 8192, "num_hidden_layers": 2}  # gradients of its weights take less than its logits
    model, *others = real(0, **sizes)
    torch.compiler.reset()
    peak = brevact.step_report(brevact.compile(model, budget=1), *others, rounds=2).packed_peak
    with as_on_a_gpu():
        planned = Training(small(**sizes), BATCH, SEQUENCE, dtype=torch.float32).allocated("compile:1+DEFAULT")
    assert abs(planned.peak - peak) < 0.1 * peak


def test_plan_leaves_out_a_budget_that_the_loss_alone_exceeds(tmp_path, capsys, monkeypatch):
    for way in ("plain", "checkpointed", "DEFAULT", "RECOMPUTE"):
        monkeypatch.delitem(WAYS, way)
    small(vocab_size=8192, num_hidden_layers=2).save_pretrained(tmp_path)
    text = command(capsys, str(tmp_path), "--sequence", "64")
    assert re.search(r"^compile:1\+DEFAULT +[0-9.]+ GiB", text, re.M)
    assert "compile:0.3+DEFAULT is left out: the head and the loss keep more than a part of 0.3" in text


@pytest.mark.parametrize("rank", [0, 8])
def test_planned_bytes_are_within_a_tenth_of_those_of_a_real_step(rank):
    found = measured(rank)
    training = Training(small(), BATCH, SEQUENCE, dtype=torch.float32, rank=rank, targets=TARGETS if rank else ())
    with as_on_a_gpu():
        planned = {way: training.allocated(way) for way in WAYS if way not in BUDGETS}
        gradients = training.sizes()[1]
    for way, (kept, peak) in found.items():
        assert abs(planned[way].kept - kept) < 0.1 * kept, way
        # a real step's gradients grow while activations end; planned ones are there from the start
        assert peak - gradients < 1.1 * planned[way].peak and planned[way].peak < 1.1 * peak, way


def command(capsys, *words):
    assert main(["plan", *words]) == 0
    return capsys.readouterr().out


@pytest.mark.usefixtures("eager_alone")
def test_the_longest_sequence_and_the_largest_batch_fit_and_more_does_not(tmp_path, capsys, monkeypatch):
    for way in ("checkpointed", "RECOMPUTE"):
        monkeypatch.delitem(WAYS, way)
    small().save_pretrained(tmp_path)
    words = [str(tmp_path), "--weights", "float32", "--sequence", "512"]
    text = command(capsys, *words, "--memory", "0.5GiB")
    rows = {line.split()[0]: line for line in text.splitlines() if line.split()[:1] and line.split()[0] in WAYS}
    assert rows.keys() == WAYS.keys()
    training = Training(configuration(str(tmp_path / "config.json")), 1, 512, dtype=torch.float32)
    with as_on_a_gpu():
        weights, gradients, _ = training.sizes()
        for way, row in rows.items():
            length, batch = (int(each.replace(",", "")) for each in re.split(r" {2,}", row)[-2:])
            room = GIB // 2 - weights - 3 * gradients

            def peak(way=way, **changes):
                return replace(training, **changes).allocated(way).peak

            assert peak(sequence=length) <= room < peak(sequence=length + 2 * 64), way
            assert peak(batch=batch) <= room < peak(batch=batch + 2), way
    assert re.search(r"plain .* 0 +0$", command(capsys, *words, "--memory", "1MiB"), re.M)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("Meta-Llama-3-8B", 8_030_261_248),
        ("mistralai/mistral-7b-v0.3", 7_248_023_552),
        ("qwen3-8b", 8_190_735_360),
        ("Qwen3-32B", 32_762_123_264),
        ("gemma-3-1b-pt", 999_885_952),
    ],
)
def test_models_of_the_table_have_their_published_numbers_of_parameters(name, parameters):
    training = Training(configuration(name), 1, 64)
    assert training.sizes()[0] == 2 * parameters


@pytest.mark.usefixtures("eager_alone")
def test_weights_of_4_bits_and_adapters_leave_room(capsys, tmp_path):
    pytest.importorskip("peft")
    small().save_pretrained(tmp_path)
    full, adapted, small_weights = (
        command(capsys, str(tmp_path), *words)
        for words in ([], ["--lora"], ["--lora", "8:q_proj", "--weights", "4bit"])
    )
    assert "all weights trained" in full and "LoRA of rank 16" in adapted and "LoRA of rank 8" in small_weights
    assert "the largest decoded weight" in small_weights and "decoded" not in adapted


@pytest.mark.exhaustive
@pytest.mark.skipif(sys.platform != "linux", reason="Liger needs Triton")
def test_liger_saves_no_logits(tmp_path):
    pytest.importorskip("liger_kernel")
    small().save_pretrained(tmp_path)
    program = (
        "from recipes.torchvision_ops import declare_missing_ops; declare_missing_ops(); "
        "from brevact.command_line.main import main; "
        f"[main(['plan', {str(tmp_path)!r}, *words]) for words in ([], ['--liger'])]"  # its patches stay in a process
    )
    found = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True)
    plain, of_liger = (float(each) for each in re.findall(r"^plain +([0-9.]+) GiB", found.stdout, re.M))
    assert of_liger < plain, found.stderr
    assert found.stdout.count("compile:1+DEFAULT is left out: its step is no single graph: ") == 1


SMALL = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 5, "num_attention_heads": 4}


@pytest.mark.parametrize(
    ("config", "words", "message"),
    [
        (
            lambda: transformers.Qwen2MoeConfig(**SMALL, num_experts=4, num_experts_per_tok=2, mlp_only_layers=[4]),
            [],
            "MODEL: blocks of Qwen2MoeConfig differ; only models of equal blocks can be planned",
        ),
        (
            lambda: transformers.BertConfig(**SMALL),
            ["--sequence", "600"],
            "--sequence 600: BertConfig has a table of 512 pos",
        ),
        (lambda: transformers.GPT2Config(n_embd=64, n_head=4), ["--lora"], "--lora: GPT2Config has no torch.nn.Linear"),
    ],
)
def test_plan_names_what_of_a_model_it_cannot_size(config, words, message, tmp_path, capsys):
    if words == ["--lora"]:
        pytest.importorskip("peft")
    config().save_pretrained(tmp_path)
    assert main(["plan", str(tmp_path), *words]) == 2
    assert message in capsys.readouterr().err


def test_plan_refuses_sequences_beyond_a_table_of_positions(tmp_path, capsys):
    sizes = {"vocab_size": 64, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128}
    transformers.GPT2Config(**sizes).save_pretrained(tmp_path)
    assert main(["plan", str(tmp_path), "--sequence", "129"]) == 2
    assert "--sequence 129: GPT2Config has a table of 128 positions; accepted is at most 128" in capsys.readouterr().err
    training = Training(configuration(str(tmp_path)), 1, 64, dtype=torch.float32)
    with as_on_a_gpu():
        assert most(training, "plain", "sequence", training.allocated("plain").peak, GIB) == 128
        assert replace(training, config=small()).most_positions() is None  # rotary positions have no table


@pytest.mark.usefixtures("eager_alone")
def test_plan_takes_configurations_whose_types_of_layers_are_fixed(tmp_path, capsys, monkeypatch):
    for way in ("checkpointed", "RECOMPUTE"):
        monkeypatch.delitem(WAYS, way)
    transformers.MambaConfig(vocab_size=64, hidden_size=64, num_hidden_layers=3).save_pretrained(tmp_path)
    assert "3 blocks" in command(capsys, str(tmp_path), "--sequence", "8")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["Llama-3-9B"], "MODEL Llama-3-9B: not known; nearest: Meta-Llama-3-8B. Accepted are Meta-Llama-3-8B, "),
        (["no/such/config.json"], "MODEL no/such/config.json: no such file"),
        (["qwen3-8b", "--memory", "24"], "--memory 24: accepted is a number with its unit"),
        (["qwen3-8b", "--memory", "3x"], "--memory 3x: accepted is a number with its unit"),
        (["qwen3-8b", "--batch", "0"], "--batch 0: accepted is an integer of at least 1"),
        (["qwen3-8b", "--sequence", "-4"], "--sequence -4: accepted is an integer of at least 1"),
        (["qwen3-8b", "--weights", "4bit"], "--weights 4bit: weights of 4 bits are frozen, and need adapters"),
        (["qwen3-8b", "--lora", "0"], "--lora 0: accepted is a rank of at least 1"),
        (["qwen3-8b", "--lora", "q_proj"], "--lora q_proj: accepted is a rank"),
        (["qwen3-8b", "--lora", "8:"], "--lora 8:: accepted is a rank"),
        (["qwen3-8b", "--lora", "8:qproj"], "--lora qproj: no linear layer of that name; accepted are q_proj, k_proj"),
    ],
)
def test_plan_refuses_with_status_2(words, message, capsys):
    if "8:qproj" in words:
        pytest.importorskip("peft")
    assert main(["plan", *words]) == 2
    assert message in capsys.readouterr().err
