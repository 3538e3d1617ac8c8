"""Every task can overfit eight examples, and `labkit predict` agrees with `labkit.pipeline`."""

from __future__ import annotations

import json

import pytest
import torch
from torch.nn import functional as F

import labkit
from tests.acceptance.command_line import call, read_lines, write_lines

pytestmark = pytest.mark.end_to_end

NAMES = "Anna Bert Clara Dirk Emma Fritz Greta Hans Ida Jens".split()
PLACES = "Oslo Lund Rome Cairo Lima Delhi Perth Kyoto Quito Bonn".split()
VISITS = list(zip(NAMES, PLACES, strict=True))
PASSAGES = [" ".join(f"{name} went to {place}." for name, place in VISITS[k : k + 5]) for k in (0, 5)]
INPUTS = {"qa": ("question", "context"), "ner": ("text",), "classify": ("text",), "embed": ("first", "second")}
STEPS = 30
SETTINGS = "--model gpt2-mini --batch-size 8 --max-length 96 --seed 1 --dropout 0".split()


def question(k: int) -> dict:
    """A question about one of the passages; every fourth has no answer."""
    name, place = VISITS[k]
    context = PASSAGES[k // 5]
    if k % 4 == 3:
        return {"question": f"What did {name} eat?", "context": context, "answers": []}
    answer = {"text": place, "start": context.index(place)}
    return {"question": f"Where did {name} go?", "context": context, "answers": [answer]}


# For each task eight examples to train on, and two for dev: labkit refuses to score what it trains on.
ROWS = {
    "qa": [question(k) for k in range(10)],
    "ner": [
        {"words": [name, "saw", place], "tags": ["B-PER", "O", "B-LOC" if k % 3 else "B-ORG"]}
        for k, (name, place) in enumerate(VISITS)
    ],
    "classify": [{"text": f"{name} saw {place}", "label": "abc"[k % 3]} for k, (name, place) in enumerate(VISITS)],
    "embed": [{"first": f"{name} sent a letter", "second": f"the post of {place}"} for name, place in VISITS],
}


def inputs_of(task: str) -> list[dict]:
    """The rows as inputs of a prediction, without what is to be predicted."""
    rows = [{"text": " ".join(row["words"])} for row in ROWS["ner"]] if task == "ner" else ROWS[task]
    return [{"id": f"row {k}"} | {name: row[name] for name in INPUTS[task]} for k, row in enumerate(rows)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """task -> (run folder, the predictions that `labkit predict` writes for a file with its inputs).

    The only evaluation is at the last step, so the last weights are kept.
    """
    made = {}

    def get(task: str):
        if task not in made:
            folder = tmp_path_factory.mktemp(task)
            train = ["train", task, *SETTINGS, "--train-file", write_lines(folder / "train.jsonl", ROWS[task][:8])]
            train += ["--dev-file", write_lines(folder / "dev.jsonl", ROWS[task][8:]), "--output-dir", folder / "run"]
            train += ["--epochs", STEPS, "--evaluate-every", STEPS, "--learning-rate", 2e-3, "--backbone-dropout", 0]
            call(*train, *(["--null-threshold", 0] if task == "qa" else []))
            source, target = write_lines(folder / "inputs.jsonl", inputs_of(task)), folder / "predictions.jsonl"
            call("predict", task, "--model", folder / "run", "--input", source, "--output", target)
            made[task] = folder / "run", read_lines(target)
        return made[task]

    return get


def test_eight_questions_are_learned(trained):
    texts = [row["text"] for row in trained("qa")[1]]
    assert texts[:8] == [row["answers"][0]["text"] if row["answers"] else "" for row in ROWS["qa"][:8]]


@pytest.mark.parametrize(("task", "field"), [("ner", "tags"), ("classify", "label")])
def test_eight_sentences_and_eight_texts_are_learned(trained, task, field):
    assert [row[field] for row in trained(task)[1]][:8] == [row[field] for row in ROWS[task][:8]]


def test_embed_retrieves_all_eight_pairs(trained):
    """The similarity of every first text with every second text, so that the ranks do not depend on labkit's scores."""
    rows = ROWS["embed"][:8]
    pairs = [{"first": one["first"], "second": other["second"]} for one in rows for other in rows]
    similarity = [row["similarity"] for row in labkit.pipeline(trained("embed")[0])(pairs)]
    assert torch.tensor(similarity).view(8, 8).argmax(dim=1).tolist() == list(range(8))


def test_lm_learns_eight_sentences(tmp_path):
    """The loss of the saved model, computed with plain torch; the first tokens differ, so it can reach 0."""
    stories = [f"{name} wrote to a friend about the streets of {place}." for name, place in VISITS[:8]]
    for number, story in enumerate(stories):
        (tmp_path / f"{number}.txt").write_text(story, encoding="utf-8")
    train = ["train", "lm", "--objective", "next", *SETTINGS, "--train-file", tmp_path, "--max-steps", STEPS]
    call(*train, "--learning-rate", 3e-3, "--output-dir", tmp_path / "run")
    lm = labkit.load(tmp_path / "run" / "model", device="cpu", dtype="float32")
    losses = []
    for story in stories:
        ids = lm.tokenizer(story, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            logits = lm.model(ids, use_cache=False).logits  # (1, seq, vocab)
        losses.append(F.cross_entropy(logits[0, :-1], ids[0, 1:]))
    assert torch.stack(losses).mean() < 0.05


@pytest.mark.parametrize("task", ROWS)
def test_predict_on_a_file_equals_the_pipeline(trained, task):
    """The file is predicted in padded batches, the pipeline gets one input at a time, so numbers are rounded apart."""
    folder, predicted = trained(task)
    pipe = labkit.pipeline(folder)
    for row, prediction in zip(inputs_of(task), predicted, strict=True):
        assert rounded(prediction) == rounded(json.loads(json.dumps(pipe(row))))


def rounded(value):
    """The value with `pytest.approx` in place of each number in it."""
    if isinstance(value, dict):
        return {name: rounded(part) for name, part in value.items()}
    if isinstance(value, list):
        return [rounded(part) for part in value]
    return pytest.approx(value, abs=1e-4) if isinstance(value, float) else value
