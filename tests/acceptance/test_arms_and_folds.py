"""What a comparison rests on: two arms that differ only in their mask, and folds that share no passage."""

from __future__ import annotations

from math import log
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import labkit
from tests.acceptance.command_line import call, losses, read, read_lines, write_lines

pytestmark = pytest.mark.end_to_end

BOATS = "ferry sloop barge tug schooner dinghy yacht trawler canoe".split()
WEIGHTS = Path("model", "model.safetensors")


def test_arms_with_the_same_seed_train_on_the_same_rows_in_the_same_order_from_the_same_start(
    without_dropout, tmp_path
):
    """A learning rate of 1e-30 changes no weight, so the saved weights are those that the run began with.

    Each step trains on one row. Its loss is -log of the probability that the saved model predicts for the row's label,
    so the loss curve shows which row each step trained on.
    """
    rows = [{"text": f"The {boat} left at noon", "label": "ABC"[k % 3]} for k, boat in enumerate(BOATS)]
    dev = [row | {"text": row["text"] + " or later"} for row in rows[:4]]
    train = ["train", "classify", "--model", without_dropout, "--preset", "mini", "--dropout", 0, "--batch-size", 1]
    train += ["--epochs", 2, "--learning-rate", 1e-30, "--train-file", write_lines(tmp_path / "train.jsonl", rows)]
    train += ["--dev-file", write_lines(tmp_path / "dev.jsonl", dev)]
    curves, orders, starts = {}, {}, {}
    for mask in ("causal", "bidirectional"):
        folder = tmp_path / mask
        call(*train, "--mask", mask, "--output-dir", folder)
        predictions = labkit.pipeline(folder)([row["text"] for row in rows])
        expected = [-log(p["probabilities"][row["label"]]) for p, row in zip(predictions, rows, strict=True)]
        curves[mask] = list(losses(folder).values())
        orders[mask] = [[k for k, loss in enumerate(expected) if abs(loss - step) < 1e-4] for step in curves[mask]]
        starts[mask] = load_file(folder / WEIGHTS)
    assert curves["causal"] != pytest.approx(curves["bidirectional"], abs=1e-3)  # the masks do differ
    assert orders["causal"] == orders["bidirectional"]
    every_row = [[k] for k in range(len(rows))]
    assert sorted(orders["causal"][: len(rows)]) == sorted(orders["causal"][len(rows) :]) == every_row
    assert starts["causal"].keys() == starts["bidirectional"].keys()
    for name, weights in starts["causal"].items():
        torch.testing.assert_close(weights, starts["bidirectional"][name], rtol=0, atol=1e-12)
    assert starts["causal"]["head.weight"].std() > 0  # zeros would be equal in any case


def test_five_folds_test_every_example_once_and_no_fold_trains_on_a_passage_that_it_tests(tmp_path):
    """Each passage has an entity type of its own, so the labels of a fold's model name the passages of its training."""
    rows = [
        {"id": f"{name}{k}", "group": f"passage {name}", "words": ["The", f"{name}{k}"], "tags": ["O", f"B-{name}"]}
        for number, name in enumerate("ABCDEFGHIJKL")
        for k in range(1 + number % 4)
    ]
    train = ["train", "ner", "--model", "gpt2-mini", "--folds", 5, "--max-steps", 1, "--batch-size", 4]
    for side, part in {"train": rows[::2], "dev": rows[1::4], "test": rows[3::4]}.items():  # passages are in two files
        train += [f"--{side}-file", write_lines(tmp_path / f"{side}.jsonl", part)]
    call(*train, "--output-dir", tmp_path / "run")
    tested = []
    for fold in range(1, 6):
        folder = tmp_path / "run" / f"fold-{fold}"
        tested.append([row["id"] for row in read_lines(folder / "predictions.test.jsonl")])
        labels = read(folder / "model" / "config.json")["id2label"].values()
        passages_trained = {label[2:] for label in labels if label != "O"}
        assert passages_trained and not passages_trained & {id[0] for id in tested[-1]}
    assert sorted(id for fold in tested for id in fold) == sorted(row["id"] for row in rows)
    assert sum(len({id[0] for id in fold}) for fold in tested) == 12  # each passage is tested in one fold
