"""Evidence posts from a CSV and a JSONL file: annotated spans, the prompt's special tokens, training and prediction."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

import labkit
from tests.acceptance.command_line import call, write_lines

pytestmark = pytest.mark.end_to_end

MARKS = ("[INST]", "[/INST]", "[POST]", "[/POST]", "[CRITERION]", "[/CRITERION]")
GARDEN = "The garden is finished.\n\nI lay awake until four again. My brother says  the roses\nlook well this year."
SHIFT = "Two late shifts this week. I can't finish a soup these days, and I used to love it. The cat is fine. Rain."
ROWS = [  # (post, criterion, evidence as annotated, the part of the post that it means)
    (GARDEN, "sleep", "I lay awake until four again.", "I lay awake until four again."),
    (GARDEN, "praise from others", "My brother says the roses look well", "My brother says  the roses\nlook well"),
    (GARDEN, "appetite", "", ""),
    (SHIFT, "appetite", "I cant finnish a soup these days", "I can't finish a soup these days"),
    (SHIFT, "work", "Two late shifts this weak.", "Two late shifts this week."),
    (SHIFT, "sleep", "", ""),
]
DEV = [
    {"post": "The tram was late. I slept in.", "criterion": "sleep", "evidence": "I slept in."},
    {"post": "I sang all the way home.", "criterion": "sleep", "evidence": None},
]
STEPS = 24


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("evidence")
    with (folder / "train.csv").open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([("post", "criterion", "evidence"), *(row[:3] for row in ROWS)])
    train = ["train", "qa", "--prompt", "evidence", "--order", "question-last", "--max-length", 160, "--batch-size", 6]
    train += ["--train-file", folder / "train.csv", "--dev-file", write_lines(folder / "dev.jsonl", DEV), "--seed", 1]
    train += ["--epochs", STEPS, "--evaluate-every", STEPS, "--learning-rate", 2e-3, "--null-threshold", 0]
    call(*train, "--dropout", 0, "--backbone-dropout", 0, "--output-dir", folder / "run")
    return folder / "run"


def test_predictions_are_the_annotated_parts_of_the_posts_and_parts_of_an_unknown_one(trained):
    """After enough steps the model answers its own training examples, so a shifted span would be visible here."""
    pipe = labkit.pipeline(trained)
    for post, criterion, _, meant in ROWS:
        prediction = pipe(question=criterion, context=post)
        assert prediction["text"] == post[prediction["start"] : prediction["end"]] == meant
    unknown = "Émile 🙂 came by.\tWe ate\nnothing at all — and  I slept\u00a0badly."
    candidates = pipe(question="sleep", context=unknown)["n_best"]
    assert len(candidates) == 5
    assert all(candidate["text"] == unknown[candidate["start"] : candidate["end"]] for candidate in candidates)


def test_the_special_tokens_are_in_the_saved_tokenizer_and_in_the_rows(trained):
    """Each mark is one token. The model reads it: a change of its embedding changes the answer's probability."""
    tokenizer = AutoTokenizer.from_pretrained(trained / "model")
    ids = [tokenizer.encode(mark, add_special_tokens=False) for mark in MARKS]
    assert all(len(one) == 1 for one in ids) and len({one[0] for one in ids}) == len(MARKS)
    pipe = labkit.pipeline(trained)
    post, criterion = ROWS[0][:2]
    embeddings = pipe.lm.model.get_input_embeddings().weight.data
    assert max(one[0] for one in ids) < len(embeddings) == len(tokenizer)
    before = pipe(question=criterion, context=post)["null_score_diff"]
    for mark, (number,) in zip(MARKS, ids, strict=True):
        kept = embeddings[number].clone()
        embeddings[number] = torch.randn(len(kept), generator=torch.Generator().manual_seed(number))
        changed = pipe(question=criterion, context=post)["null_score_diff"]
        embeddings[number] = kept
        assert changed != pytest.approx(before, abs=1e-3), mark
