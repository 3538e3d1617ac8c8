"""The memory estimate, held against what a process of its own really took."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import pytest
import torch

import labkit
from labkit.errors import TrainingError
from labkit.tasks import needs
from labkit.tasks.needs import Need, measured_need, require_room, room_for
from labkit.tasks.plans import Plan

pytestmark = pytest.mark.end_to_end

_STEPS = """
    import json, sys, torch, labkit
    from labkit.tasks.needs import measured_need
    from labkit.training import peak_memory

    batch_size, length, checkpointing = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "True"
    dtype = sys.argv[4]

    def batch(rows):
        one = torch.zeros(rows, dtype=torch.long)
        ids = torch.randint(3, 4096, (rows, length))
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "start_positions": one, "end_positions": one}

    model = labkit.load("gpt2-mini", task="question-answering", device="cpu").model.train()
    need = measured_need(
        model, lambda m, b: m(**b).loss, batch(2), share=batch_size / 2, gradient_checkpointing=checkpointing,
        dtype=dtype,
    )
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
            loss = model(**batch(batch_size)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(json.dumps([need.total, peak_memory()]))
"""


@pytest.mark.parametrize(
    ("batch_size", "length", "checkpointing", "dtype"),
    [
        (24, 384, False, "float32"),
        pytest.param(24, 384, True, "float32", marks=pytest.mark.slow),
        (4, 64, False, "float32"),
        # minutes on a processor that has no bfloat16
        pytest.param(24, 384, False, "bfloat16", marks=pytest.mark.slow),
        # the copies of the weights are there once, and not for every two rows: in CI by counting them, below
        pytest.param(64, 16, False, "bfloat16", marks=pytest.mark.slow),
    ],
)
def test_the_estimate_is_near_what_the_training_takes(tmp_path, batch_size, length, checkpointing, dtype):
    script = tmp_path / "steps.py"
    script.write_text(textwrap.dedent(_STEPS))
    done = subprocess.run(
        [sys.executable, str(script), str(batch_size), str(length), str(checkpointing), dtype],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([os.getcwd(), *sys.path])},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    estimate, taken = json.loads(done.stdout)
    assert 0.7 < estimate / taken < 1.4, (estimate / 1e9, taken / 1e9)


def test_measuring_leaves_the_model_as_it_was():
    model = labkit.load("tiny-gpt2", task="question-answering", device="cpu").model
    before = {name: p.clone() for name, p in model.named_parameters()}
    ids, one = torch.randint(3, 100, (1, 20)), torch.zeros(1, dtype=torch.long)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "start_positions": one, "end_positions": one}
    state = torch.get_rng_state()
    need = measured_need(model, lambda m, b: m(**b).loss, batch, share=8.0)
    assert torch.equal(torch.get_rng_state(), state)
    assert not model.training and all(p.grad is None for p in model.parameters())
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())
    assert (need.batch_size, need.length) == (8, 20)
    parameters = sum(p.numel() for p in model.parameters())
    assert (need.weights, need.training) == (4 * parameters, 12 * parameters)


def test_measuring_keeps_nothing_of_the_model_alive():
    import gc
    import weakref

    model = labkit.load("tiny-gpt2", task="question-answering", device="cpu").model
    ids, one = torch.randint(3, 100, (1, 20)), torch.zeros(1, dtype=torch.long)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "start_positions": one, "end_positions": one}
    measured_need(model, lambda m, b: m(**b).loss, batch, share=1.0)
    kept = [weakref.ref(model), *(weakref.ref(p) for p in model.parameters())]
    del model
    gc.collect()
    assert not any(each() is not None for each in kept)


def test_only_what_is_trained_needs_gradients_and_moments(monkeypatch):
    model = labkit.load("tiny-gpt2", task="question-answering", device="cpu").model
    ids, one = torch.randint(3, 100, (1, 20)), torch.zeros(1, dtype=torch.long)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "start_positions": one, "end_positions": one}
    full = measured_need(model, lambda m, b: m(**b).loss, batch, share=8.0)
    model.backbone.requires_grad_(False)
    frozen = measured_need(model, lambda m, b: m(**b).loss, batch, share=8.0)
    assert frozen.training == 12 * sum(p.numel() for p in model.head.parameters())
    assert frozen.activations < full.activations / 3
    monkeypatch.setattr("labkit.tasks.needs.process_count", lambda: 2)  # whose gradients lie in buckets too
    several = measured_need(model, lambda m, b: m(**b).loss, batch, share=8.0)
    assert several.training == 16 * sum(p.numel() for p in model.head.parameters())


def test_activations_grow_with_the_batch_and_the_length():
    model = labkit.load("tiny-gpt2", task="question-answering", device="cpu").model

    def activations(length: int, share: float) -> int:
        ids, one = torch.randint(3, 100, (1, length)), torch.zeros(1, dtype=torch.long)
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "start_positions": one, "end_positions": one}
        return measured_need(model, lambda m, b: m(**b).loss, batch, share=share).activations

    assert activations(32, 4.0) == pytest.approx(4 * activations(32, 1.0), rel=0.01)
    assert activations(64, 1.0) == pytest.approx(2 * activations(32, 1.0), rel=0.2)


def test_the_copies_of_the_weights_in_16_bits_do_not_grow_with_the_batch():
    model = labkit.load("tiny-gpt2", task="question-answering", device="cpu").model

    def need(rows: int, share: float = 1.0):
        ids, one = torch.randint(3, 100, (rows, 24)), torch.zeros(rows, dtype=torch.long)
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "start_positions": one, "end_positions": one}
        return measured_need(model, lambda m, b: m(**b).loss, batch, share=share, dtype="bfloat16")

    few, many = need(2), need(8)
    assert few.copies == many.copies > 0
    assert few.copies <= few.weights  # 2 bytes for 4, and each weight once or twice
    assert many.activations == pytest.approx(4 * few.activations, rel=0.02)
    foretold = need(2, share=4.0)
    assert foretold.total == pytest.approx(many.total, rel=0.01)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_trial_that_does_not_fit_is_one_clear_error_or_tried_where_the_training_needs_less(checkpointing):
    def full(model, batch):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 12 GiB")

    model, trial = torch.nn.Linear(1, 1), {"input_ids": torch.zeros(2, 8, dtype=torch.long)}

    def said():
        return room_for(model, full, trial, Plan(gradient_checkpointing=checkpointing), share=1.0, dtype="float32")

    if checkpointing:
        assert said() == (
            "the memory is full with the forward pass of 2 x 8, so what this training needs is not known; it is tried"
        )
    else:
        with pytest.raises(TrainingError, match=r"forward pass of 2 x 8; try --batch-size 2 .* --gradient-checkpointi"):
            said()


@pytest.mark.parametrize(
    ("device", "free", "said"),
    [
        ("cpu", 50, "are free"),
        ("cpu", 35, None),
        ("cuda:0", 50, "are free"),
        ("cuda:0", 35, "are free: it may not fit"),
        ("cuda:0", 20, None),
    ],
)
def test_on_a_gpu_what_may_fit_is_tried(monkeypatch, device, free, said):
    need = Need(weights=5, training=15, activations=10, base=0, batch_size=2, length=8, copies=2)
    assert need.to_try("cpu") == need.total == 1.2 * 20 + 1.7 * 10 + 2 and need.to_try("cuda") == 5 + 15 + 10 + 2
    model = torch.nn.Linear(1, 1)
    monkeypatch.setattr(model, "parameters", lambda: iter([SimpleNamespace(device=device, requires_grad=True)]))
    monkeypatch.setattr(needs.memory, "available_bytes", lambda at: free if at == device else None)
    if said:
        assert require_room(need, model, Plan()).endswith(said)
    else:
        with pytest.raises(TrainingError, match="try --batch-size"):
            require_room(need, model, Plan())
