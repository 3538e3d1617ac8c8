"""Every task can overfit eight examples, and `labkit predict` agrees with `labkit.pipeline`.

The tests start `python -m labkit` as a user does. Each task is trained once for the whole file.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import labkit
from tests.acceptance.command_line import run

pytestmark = pytest.mark.end_to_end

FERRY = "The ferry left Borvik at noon with nine sheep. Its captain, Ines Aldo, had lost her coat."
MILL = "Otto Brandt sold the mill in 1921. A baker from Lund bought it and painted the door green."
# For each task eight examples to train on, and two for dev: labkit refuses to score what it trains on.
QUESTIONS = [  # two passages, so that only the question tells which span is the answer; two have no answer
    (FERRY, "When did the ferry leave?", "noon"),
    (FERRY, "Who was the captain?", "Ines Aldo"),
    (FERRY, "What had she lost?", "her coat"),
    (FERRY, "What did the ticket cost?", None),
    (MILL, "Who sold the mill?", "Otto Brandt"),
    (MILL, "When was it sold?", "1921"),
    (MILL, "What was painted green?", "the door"),
    (MILL, "Who built the mill?", None),
    (FERRY, "Where did the ferry come from?", "Borvik"),
    (MILL, "Where did the baker come from?", "Lund"),
]
SENTENCES = [  # words and tags; "Lund" and "May" have different tags in different sentences
    ("Ines Aldo left Borvik", "B-PER I-PER O B-LOC"),
    ("May Lund sings in Oslo", "B-PER I-PER O O B-LOC"),
    ("the baker moved to Lund", "O O O O B-LOC"),
    ("it rained all through May", "O O O O B-DATE"),
    ("Nordic Freight hired Otto", "B-ORG I-ORG O B-PER"),
    ("nobody answered the phone", "O O O O"),
    ("Otto joined Blue Mill Bakery", "B-PER O B-ORG I-ORG I-ORG"),
    ("in 1921 Borvik had no bridge", "O B-DATE B-LOC O O O"),
    ("Otto moved to Oslo", "B-PER O O B-LOC"),
    ("Ines sings all night", "B-PER O O O"),
]
TEXTS = [
    ("the rain would not stop", "wet"),
    ("the sun burned all day", "dry"),
    ("not a drop fell in June", "dry"),
    ("the cellar was under water", "wet"),
    ("a gale took the roof", "windy"),
    ("dust lay on every leaf", "dry"),
    ("the flags stood straight out", "windy"),
    ("our boots never dried", "wet"),
    ("the well ran dry", "dry"),
    ("the river rose", "wet"),
]
PAIRS = [
    ("a boat", "ferry to the island"),
    ("a bird", "swallow under the eaves"),
    ("a tool", "hammer with a short handle"),
    ("a fruit", "ripe plums in a bowl"),
    ("a letter", "envelope with a red stamp"),
    ("a storm", "thunder over the hills"),
    ("a child", "girl on the swing"),
    ("a coat", "wool with two pockets"),
    ("a mill", "flour on the stones"),
    ("a door", "hinges and a lock"),
]
ROWS = {
    "qa": [
        {"question": q, "context": c, "answers": [] if a is None else [{"text": a, "start": c.index(a)}]}
        for c, q, a in QUESTIONS
    ],
    "ner": [{"text": words, "words": words.split(), "tags": tags.split()} for words, tags in SENTENCES],
    "classify": [{"text": text, "label": label} for text, label in TEXTS],
    "embed": [{"first": first, "second": second} for first, second in PAIRS],
}
INPUTS = {"qa": ("question", "context"), "ner": ("text",), "classify": ("text",), "embed": ("first", "second")}
STEPS = 40
SETTINGS = "--model gpt2-mini --batch-size 8 --max-length 96 --seed 1 --dropout 0".split()


def write_rows(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """task -> (run folder, inputs, what `labkit predict` writes for a file with them).

    The only evaluation is at the last step, so the last weights are kept.
    """
    made: dict[str, tuple[Path, list[dict], list[dict]]] = {}

    def get(task: str) -> tuple[Path, list[dict], list[dict]]:
        if task not in made:
            folder = tmp_path_factory.mktemp(task)
            log, target = folder / "log", folder / "predictions.jsonl"
            rows = [{name: row[name] for name in row if task != "ner" or name != "text"} for row in ROWS[task]]
            run(
                "train", task, *SETTINGS, "--train-file", write_rows(folder / "train.jsonl", rows[:8]),
                "--dev-file", write_rows(folder / "dev.jsonl", rows[8:]), "--epochs", STEPS, "--evaluate-every", STEPS,
                "--learning-rate", 1e-3, "--backbone-dropout", 0, "--output-dir", folder / "run",
                *(["--null-threshold", 0] if task == "qa" else []), log=log,
            )  # fmt: skip
            inputs = [
                {"id": f"row {k}"} | {name: row[name] for name in INPUTS[task]} for k, row in enumerate(ROWS[task])
            ]
            source = write_rows(folder / "inputs.jsonl", inputs)
            run("predict", task, "--model", folder / "run", "--input", source, "--output", target, log=log)
            made[task] = folder / "run", inputs, [json.loads(line) for line in target.read_text().splitlines()]
        return made[task]

    return get


@pytest.mark.parametrize(
    ("task", "field", "expected"),
    [
        ("qa", "text", [answer or "" for _, _, answer in QUESTIONS]),
        ("ner", "tags", [tags.split() for _, tags in SENTENCES]),
        ("classify", "label", [label for _, label in TEXTS]),
    ],
)
def test_all_eight_examples_are_learned(trained, task, field, expected):
    _, _, predicted = trained(task)
    assert [row[field] for row in predicted[:8]] == expected[:8]


def test_embed_retrieves_all_eight_pairs(trained):
    """The similarity of every first text with every second text, so that the ranks do not depend on labkit's scores."""
    pipe = labkit.pipeline(trained("embed")[0])
    pairs = [{"first": first, "second": second} for first, _ in PAIRS[:8] for _, second in PAIRS[:8]]
    similarity = torch.tensor([row["similarity"] for row in pipe(pairs)]).view(8, 8)
    assert similarity.argmax(dim=1).tolist() == list(range(8))


def test_lm_learns_eight_sentences(tmp_path):
    """The loss of the saved model, computed with plain torch; the first tokens differ, so it can reach 0."""
    names, rest = "Anna Bert Clara Dirk Emma Fritz Greta Hans".split(), [second for _, second in PAIRS]
    stories = [f"{name} wrote to a friend about {text}." for name, text in zip(names, rest, strict=False)]
    for number, story in enumerate(stories):
        (tmp_path / f"{number}.txt").write_text(story, encoding="utf-8")
    files = [part for number in range(8) for part in ("--train-file", tmp_path / f"{number}.txt")]
    run(
        "train", "lm", "--objective", "next", *SETTINGS, *files, "--max-steps", STEPS, "--learning-rate", 2e-3,
        "--output-dir", tmp_path / "run", log=tmp_path / "log",
    )  # fmt: skip
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
    folder, inputs, predicted = trained(task)
    pipe = labkit.pipeline(folder)
    assert [row["id"] for row in predicted] == [row["id"] for row in inputs]
    for row, prediction in zip(inputs, predicted, strict=True):
        assert rounded(prediction) == rounded(json.loads(json.dumps(pipe(row))))


def rounded(value):
    """The value with `pytest.approx` in place of each number in it."""
    if isinstance(value, dict):
        return {name: rounded(part) for name, part in value.items()}
    if isinstance(value, list):
        return [rounded(part) for part in value]
    return pytest.approx(value, abs=1e-4) if isinstance(value, float) else value
