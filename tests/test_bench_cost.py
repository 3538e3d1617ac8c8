"""`labkit bench cost`: what it counts, what it does with what cannot be measured, and what is left after a kill."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace

import psutil
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig

import labkit
from labkit import memory
from labkit.bench import cost as bench
from labkit.bench import cost_report, cost_row, flops, shapes
from labkit.bench.cost_row import Row
from labkit.errors import LabkitError
from labkit.heads import Head
from labkit.tasks.adapters import trained_part

pytestmark = pytest.mark.end_to_end

ROW = Row("tiny-gpt2", 2, 32, "float32", None, "full", "bidirectional", "cpu", 2)
GRID = ["--models", "tiny-gpt2,tiny-gemma2", "--batch-sizes", "2", "--lengths", "16", "--attn", "sdpa", "--steps", "2"]


def model_for(name: str, method: str, mask: str = "causal"):
    lm = labkit.load(name, task=Head("token-classification", labels=cost_row.LABELS, dropout=0.0), attn="eager")
    if mask == "bidirectional":
        labkit.to_bidirectional(lm.model)
    return trained_part(lm.model, method, rank=cost_row.RANK).train()


def counted_by_torch(model, length: int) -> float:
    """FLOPs per token of a forward and a backward pass, as torch counts them operation by operation."""
    batch = cost_row._batch(replace(ROW, length=length), model.config.get_text_config().vocab_size)
    with FlopCounterMode(display=False) as counter:
        cost_row.loss_of(model, batch).backward()
    return counter.get_total_flops() / (ROW.batch_size * length)


# ---- the arithmetic ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tiny-gpt2", "tiny-llama", "tiny-gemma3"])
@pytest.mark.parametrize("mask", ["causal", "bidirectional"])
def test_flops_of_full_training_are_those_that_torch_counts(name, mask):
    model = model_for(name, "full", mask)
    length = 8 if name == "tiny-gemma3" else 96  # within the window: eager attention computes what a window saves
    assert flops.flops_per_token(model, length, mask=mask) == pytest.approx(counted_by_torch(model, length), rel=0.03)


@pytest.mark.parametrize("name", ["tiny-gpt2", "tiny-llama"])
def test_flops_of_lora_are_those_that_torch_counts_and_what_the_first_layer_saves(name):
    """The input of the first layer needs no gradient, so torch leaves one product out for each matrix that reads it."""
    model, length = model_for(name, "lora"), 96
    first = (".h.0.attn.c_attn.",) if name == "tiny-gpt2" else tuple(f".0.self_attn.{x}_proj." for x in "qkv")
    saved = 0
    for weight_name, weight in model.named_parameters():
        if any(part in weight_name for part in first) and weight.ndim == 2 and "lora_B" not in weight_name:
            saved += 2 * weight.numel()
    assert saved
    formula = flops.flops_per_token(model, length, mask="causal")
    assert formula - saved == pytest.approx(counted_by_torch(model, length), rel=0.005)


def test_frozen_weights_cost_two_thirds_and_a_window_is_counted_as_wide_as_the_mask_makes_it():
    model = model_for("tiny-gemma3", "full")

    def per_token(length: int, mask: str) -> float:
        return flops.flops_per_token(model, length, mask=mask)

    heads_times_width = 4 * 16
    # one local layer (8 tokens back, 15 both ways) and one global layer
    assert per_token(64, "causal") - per_token(1, "causal") == 12 * heads_times_width * (8 + 64 - 2)
    assert per_token(64, "bidirectional") - per_token(64, "causal") == 12 * heads_times_width * (15 - 8)
    trained = per_token(64, "causal") - 12 * heads_times_width * (8 + 64)
    model.requires_grad_(False)
    assert per_token(64, "causal") - 12 * heads_times_width * (8 + 64) == trained * 4 / 6


@pytest.mark.parametrize("name", ["gpt2", "gemma-2-2b", "gemma-2-9b"])
def test_random_shapes_have_as_many_weights_as_the_published_models(name):
    import transformers

    kind_of_config, sizes = shapes.SHAPES[name]
    config = getattr(transformers, kind_of_config)(**sizes)
    assert isinstance(config, type(AutoConfig.for_model(config.model_type)))
    kind = transformers.AutoModelForCausalLM._model_mapping[type(config)]
    assert memory.configured_parameters(config, kind) == shapes.PARAMETERS[name]


# ---- one row -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["full", "lora"])
def test_numbers_of_a_row_hang_together_and_both_arms_compute_the_same(method):
    row = cost_row.measure(replace(ROW, model="tiny-llama", method=method))
    assert row["reason"] is None
    assert row["logits_gap"] < 1e-5
    assert row["mfu"] == pytest.approx(row["flops_per_second"] / row["matmul_flops_per_second"])
    assert row["flops_per_second"] == pytest.approx(row["flops_per_token"] * row["tokens_per_second"])
    assert row["tokens_per_second"] == pytest.approx(2 * 32 / row["seconds_per_step"]["median"])
    assert row["samples_per_second"] * 32 == pytest.approx(row["tokens_per_second"])
    ratios = [p / o for p, o in zip(*(row[k]["each"] for k in ("plain_seconds_per_step", "seconds_per_step")))]  # noqa: B905
    assert row["speed_over_plain"]["each"] == pytest.approx(ratios, rel=0.02)
    assert (row["trained_parameters"] == row["parameters"]) == (method == "full")


def test_causal_plain_arm_is_causal_and_bidirectional_one_is_not():
    """Otherwise their agreement with labkit's arm, or their speed beside it, would say nothing."""
    for mask, moves in (("causal", False), ("bidirectional", True)):
        _, plain, _ = cost_row._both(replace(ROW, model="tiny-llama", mask=mask))
        plain.eval()
        batch = cost_row._batch(ROW, 64)
        before = plain(batch["input_ids"], batch["attention_mask"])[0, 0]
        batch["input_ids"][0, -1] = (batch["input_ids"][0, -1] + 1) % 64
        after = plain(batch["input_ids"], batch["attention_mask"])[0, 0]
        assert bool((before - after).abs().max() > 1e-4) == moves


def test_matmul_rate_is_the_arithmetic_of_a_product_over_the_seconds_of_the_fastest(monkeypatch):
    monkeypatch.setitem(flops.SIDES, "cpu", 64)
    clock = iter([0.0, 1.0, 2.0, 2.0, 2.0, 2.5, 2.5, 2.5, 5.5, 6.0])  # three products, of 1, 0.5 and 3 seconds
    monkeypatch.setattr(flops.time, "perf_counter", lambda: next(clock))
    assert flops.matmul_rate("float32", "cpu", seconds=4.0) == 2 * 64**3 / 0.5


@pytest.mark.parametrize(("rate", "side"), [(2e6, 32), (1.2e6, 16), (1e3, 8)])
def test_matmul_rate_takes_a_smaller_product_where_a_large_one_would_take_minutes(monkeypatch, rate, side):
    """As in bfloat16 on a processor that has none: a product of side n takes 2 n ** 3 / rate seconds here."""
    monkeypatch.setitem(flops.SIDES, "cpu", 32)
    monkeypatch.setattr(flops, "SMALLEST_SIDE", 8)
    asked = []
    monkeypatch.setattr(flops, "_seconds", lambda a, b, device: asked.append(len(a)) or 2 * len(a) ** 3 / rate)
    clock = itertools.count()
    monkeypatch.setattr(flops.time, "perf_counter", lambda: next(clock))
    assert flops.matmul_rate("float32", "cpu", seconds=0.05) == pytest.approx(rate)
    assert asked[-1] == side


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model": "tiny-gemma2", "attn": "sdpa"}, "would lose its softcap"),
        ({"model": "tiny-gpt2", "attn": "flex_attention"}, "cannot use attn='flex_attention'"),
        ({"model": "tiny-gpt2", "length": 4096}, "too long: tiny-gpt2 has 1,024 positions"),
        ({"model": "someone/private"}, "someone/private"),
    ],
)
def test_row_that_cannot_be_measured_says_why(change, reason):
    found = cost_row.measure(replace(ROW, **change))
    assert list(found) == ["reason"] and reason in found["reason"]


def test_row_that_does_not_fit_says_how_much_it_needs_and_is_not_tried(monkeypatch):
    monkeypatch.setattr(memory, "available_bytes", lambda device="cpu": 0)
    reason = cost_row.measure(ROW)["reason"]
    assert re.match(r"does not fit: needs about [\d.]+ GB at batch 2 x 32, [\d.]+ GB are free", reason)
    reason = cost_row.measure(replace(ROW, model="random:gemma-2-9b", method="lora", dtype="bfloat16"))["reason"]
    assert re.match(r"does not fit: random:gemma-2-9b in bfloat16 needs about 22\.\d GB", reason)


def test_random_shape_is_trained_in_the_dtype_asked_for(monkeypatch):
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "query_pre_attn_scalar": 8}
    monkeypatch.setitem(shapes.SHAPES, "small", ("Gemma2Config", sizes))
    row = replace(ROW, model="random:small", method="lora", dtype="bfloat16")
    ours, _, backend = cost_row._both(row)
    assert backend == "eager"
    assert {p.dtype for n, p in ours.named_parameters() if "layers" in n and not p.requires_grad} == {torch.bfloat16}
    assert {p.dtype for p in ours.parameters() if p.requires_grad} == {torch.float32}
    assert cost_row.measure(row)["reason"] is None
    assert "would lose its softcap" in cost_row.measure(replace(row, attn="sdpa"))["reason"]


def test_plain_arm_trains_the_very_weights_of_labkits_arm():
    """Otherwise the one arm would have more or fewer weights to train than the other."""
    for method in ("full", "lora"):
        ours, plain, _ = cost_row._both(replace(ROW, model="tiny-llama", method=method))
        head = {id(p) for p in plain.head.parameters()}
        assert head <= {id(p) for p in ours.parameters() if p.requires_grad}
        trained = [sum(p.numel() for p in model.parameters() if p.requires_grad) for model in (ours, plain)]
        assert trained[0] == trained[1]
        kept = {id(p) for p in plain.parameters() if not (method == "lora" and p.requires_grad and id(p) not in head)}
        assert kept <= {id(p) for p in ours.parameters()}


def test_nine_billion_weights_are_trained_with_lora_unless_asked_otherwise():
    axes = {"batch_sizes": [1], "lengths": [8], "dtypes": ["bfloat16"], "attn": ["eager"]}
    axes |= {"mask": "causal", "steps": 1, "device": "cpu"}
    two, nine = bench.grid(models=["random:gemma-2-2b", "random:gemma-2-9b"], method=None, **axes)
    assert (two.method, two.note) == ("full", "")
    assert nine.method == "lora" and "takes over 148 GB" in nine.note
    assert bench.grid(models=["random:gemma-2-9b"], method="full", **axes)[0].method == "full"


# ---- the command ---------------------------------------------------------------------------------------------------


def test_run_leaves_a_table_and_a_picture_that_agree_with_the_json(labkit_command, tmp_path):
    code, out, err = labkit_command("bench", "cost", *GRID, "--output-dir", tmp_path / "run", "--json")
    found = json.loads(out)
    assert code == 0 and "Traceback" not in err
    assert found == json.loads((tmp_path / "run" / "cost.json").read_text())
    gpt2, gemma2 = found["rows"]
    assert gpt2["reason"] is None and "softcap" in gemma2["reason"]
    lines = [line for line in (tmp_path / "run" / "cost.md").read_text().splitlines() if line.startswith("| tiny")]
    cells = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in lines]
    assert cells == [cost_report.cells(gpt2)]
    shown = dict(zip(cost_report.COLUMNS, cells[0], strict=True))
    assert float(shown["tokens/s"].replace(",", "")) == pytest.approx(gpt2["tokens_per_second"], abs=0.5)
    assert float(shown["MFU"].strip("%")) == pytest.approx(100 * gpt2["mfu"], abs=0.05)
    assert gemma2["reason"] in (tmp_path / "run" / "cost.md").read_text()
    drawn = (tmp_path / "run" / "cost.svg").read_text()
    assert f"{gpt2['tokens_per_second']:,.0f}, MFU" in drawn and "cannot use" in drawn
    assert found["matmul_flops_per_second"] == {"float32": gpt2["matmul_flops_per_second"]}

    code, _, err = labkit_command("bench", "cost", *GRID, "--output-dir", tmp_path / "run")
    assert code == 2 and "holds a run already: --resume goes on" in err
    code, out, _ = labkit_command("bench", "cost", *GRID, "--output-dir", tmp_path / "run", "--resume", "--json")
    assert code == 0 and json.loads(out) == found


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_killed_run_goes_on_with_the_next_row_and_measures_none_twice(tmp_path):
    folder = tmp_path / "run"
    command = [sys.executable, "-m", "labkit", "bench", "cost", "--output-dir", str(folder)]
    command += ["--models", "tiny-gpt2", *GRID[2:-4], "--attn", "sdpa,eager", "--steps", "2"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    first = subprocess.Popen(command, start_new_session=True, **quiet)
    row, second = folder / "rows" / "000.json", folder / "rows" / "001.json"
    deadline = time.monotonic() + 120
    while not row.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    assert row.exists() and not second.exists() and not (folder / "cost.json").exists()
    was = row.read_bytes(), row.stat().st_mtime_ns
    subprocess.run([*command, "--resume"], check=True, **quiet)
    assert (row.read_bytes(), row.stat().st_mtime_ns) == was
    rows = json.loads((folder / "cost.json").read_text())["rows"]
    assert rows[0] == json.loads(was[0])
    assert [(each["attn"], each["reason"]) for each in rows] == [("sdpa", None), ("eager", None)]


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_the_process_of_a_row_does_not_outlive_the_command_that_was_killed(tmp_path):
    waits = tmp_path / "waits.py"
    waits.write_text(
        "import os, subprocess, sys, time\n"
        "if len(sys.argv) > 1:\n"
        "    from labkit.bench import cost_row\n"
        "    cost_row.measure = lambda row: print(os.getpid(), flush=True) or time.sleep(120)\n"
        "    cost_row.main()\n"
        f"row = {json.dumps(asdict(ROW))!r}\n"
        "child = subprocess.Popen([sys.executable, __file__, 'row'], stdin=subprocess.PIPE, text=True)\n"
        "child.communicate(row)\n"
    )
    command = subprocess.Popen([sys.executable, str(waits)], stdout=subprocess.PIPE, text=True)
    row = int(command.stdout.readline())
    os.kill(command.pid, signal.SIGKILL)  # it alone, not its group
    command.wait()
    deadline = time.monotonic() + 60
    while psutil.pid_exists(row) and psutil.Process(row).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the row's process goes on by itself"
        time.sleep(0.2)


def test_rows_that_were_not_measured_for_want_of_memory_are_tried_again_and_refusals_are_not(monkeypatch, tmp_path):
    reasons = iter(["does not fit: needs 9 GB", "its process was killed", "too long: 64 positions", None])
    asked, numbers = [], cost_row.measure(ROW)

    def measured(row):
        asked.append(row.batch_size)
        reason = next(reasons)
        return asdict(row) | ({"reason": reason} if reason else numbers)

    monkeypatch.setattr(bench, "_in_its_own_process", measured)
    where = {"models": ["tiny-gpt2"], "batch_sizes": [1, 2, 3, 4], "lengths": [8], "attn": ["sdpa"], "device": "cpu"}
    bench.cost(tmp_path / "run", **where)
    reasons = iter([None, None])
    found = bench.cost(tmp_path / "run", **where, resume=True)
    assert asked == [1, 2, 3, 4, 1, 2]
    assert [row["reason"] for row in found["rows"]] == [None, None, "too long: 64 positions", None]


def test_the_arithmetic_of_a_mixture_of_experts_is_not_guessed():
    from transformers import MixtralConfig, MixtralModel

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 4}
    with pytest.raises(LabkitError, match="experts is not counted"):
        flops.flops_per_token(MixtralModel(MixtralConfig(**sizes, **heads)), 16, mask="causal")


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_row_whose_process_dies_is_recorded_and_the_next_one_is_measured(monkeypatch, tmp_path):
    """Killed from outside, as a system does whose memory runs out, in the first row only."""
    stand_in = tmp_path / "python"
    stand_in.write_text(
        "#!/bin/sh\n"
        f'if [ ! -e "{tmp_path}/killed" ]; then touch "{tmp_path}/killed"; kill -9 $$; fi\n'
        f'exec "{sys.executable}" "$@"\n'
    )
    stand_in.chmod(0o755)
    monkeypatch.setattr(bench.sys, "executable", str(stand_in))
    found = bench.cost(tmp_path / "run", models=["tiny-gpt2"], batch_sizes=[1, 2], lengths=[8], attn=["sdpa"])
    first, second = found["rows"]
    assert first["reason"] == "its process was killed, most likely as memory ran out"
    assert second["reason"] is None and second["tokens_per_second"] > 0


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--models", "gpt2-minni"], "no model is called 'gpt2-minni'.*did you mean gpt2-mini"),
        (["--models", "random:gemma-5"], "no shape 'random:gemma-5'; choose one of random:gpt2"),
        (["--lengths", "0"], "a length is 0; it must be at least 1"),
        (["--batch-sizes", "two"], "'two' is no whole number"),
        (["--dtypes", "float23"], "the dtype is 'float23'; choose one of float32, bfloat16"),
        (["--attn", "fast"], "the attention backend is 'fast'; choose one of default, eager"),
        (["--method", "half"], "the method is 'half'; choose one of full, lora"),
        (["--mask", "diagonal"], "the mask is 'diagonal'; choose one of bidirectional, causal"),
        (["--device", "tpu"], "the device is 'tpu'; choose cpu"),
    ],
)
def test_bad_input_is_one_clear_line_and_leaves_nothing_behind(labkit_command, tmp_path, arguments, complaint):
    code, out, err = labkit_command("bench", "cost", "--output-dir", tmp_path / "run", *arguments)
    assert (code, out) == (2, "")
    assert re.search(complaint, err) and len(err.splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_help_has_an_example(labkit_command):
    code, out, _ = labkit_command("bench", "cost", "--help")
    assert code == 0 and "Example: labkit bench cost --models" in " ".join(out.split())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_row_on_a_gpu_has_a_peak_for_each_arm(attn):
    row = cost_row.measure(Row("random:gpt2", 2, 128, "bfloat16", attn, "full", "bidirectional", "cuda", 3))
    assert row["reason"] is None and 0 < row["mfu"] < 1
    weights_and_moments = 16 * row["parameters"]
    assert row["peak_memory_bytes"] > weights_and_moments * 0.9
    assert row["plain_peak_memory_bytes"] == pytest.approx(row["peak_memory_bytes"], rel=0.1)
