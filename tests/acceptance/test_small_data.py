"""Every task can overfit eight examples, and `labkit predict` agrees with `labkit.pipeline`.

The tests start `python -m labkit` as a user does. Each task is trained once for the whole file.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import labkit

pytestmark = pytest.mark.end_to_end

FERRY = "The ferry left Borvik at noon with nine sheep. Its captain, Ines Aldo, had lost her coat."
MILL = "Otto Brandt sold the mill in 1921. A baker from Lund bought it and painted the door green."
QUESTIONS = [  # two passages, so that only the question tells which span is the answer; two have no answer
    (FERRY, "When did the ferry leave?", "noon"),
    (FERRY, "Who was the captain?", "Ines Aldo"),
    (FERRY, "What had she lost?", "her coat"),
    (FERRY, "What did the ticket cost?", None),
    (MILL, "Who sold the mill?", "Otto Brandt"),
    (MILL, "When was it sold?", "1921"),
    (MILL, "What was painted green?", "the door"),
    (MILL, "Who built the mill?", None),
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
]
STORIES = [f"{name} {rest}." for name, rest in zip(
    "Anna Bert Clara Dirk Emma Fritz Greta Hans".split(),
    ["kept bees behind the mill", "drove the last bus home", "painted her door green", "sold nine sheep at noon",
     "wrote letters to the moon", "lost a coat in the rain", "found a map of Borvik", "mended clocks by candle light"],
    strict=True,
)]  # fmt: skip
ROWS = {
    "qa": [
        {"question": q, "context": c, "answers": [] if a is None else [{"text": a, "start": c.index(a)}]}
        for c, q, a in QUESTIONS
    ],
    "ner": [{"words": words.split(), "tags": tags.split()} for words, tags in SENTENCES],
    "classify": [{"text": text, "label": label} for text, label in TEXTS],
    "embed": [{"first": first, "second": second} for first, second in PAIRS],
}
OTHER_ROWS = {  # two for dev, two for test
    "qa": [
        {"question": q, "context": c, "answers": [{"text": a, "start": c.index(a)}]}
        for c, q, a in [
            (FERRY, "Where did the ferry come from?", "Borvik"), (FERRY, "How many sheep were there?", "nine"),
            (MILL, "Where did the baker come from?", "Lund"), (MILL, "Who bought the mill?", "A baker from Lund"),
        ]
    ],
    "ner": [
        {"words": words.split(), "tags": tags.split()}
        for words, tags in [
            ("Otto moved to Oslo", "B-PER O O B-LOC"), ("Ines sings all night", "B-PER O O O"),
            ("May left the bakery", "B-PER O O O"), ("it rained in Oslo", "O O O B-LOC"),
        ]
    ],
    "classify": [
        {"text": text, "label": label}
        for text, label in [
            ("the well ran dry", "dry"), ("the river rose", "wet"), ("the sails filled", "windy"), ("it poured", "wet"),
        ]
    ],
    "embed": [
        {"first": first, "second": second}
        for first, second in [
            ("a mill", "flour on the stones"), ("a door", "hinges and a lock"),
            ("a map", "roads on paper"), ("a bee", "honey in the comb"),
        ]
    ],
}  # fmt: skip
INPUTS = {"qa": ("question", "context"), "ner": ("text",), "classify": ("text",), "embed": ("first", "second")}
STEPS = 40
SETTINGS = "--model gpt2-mini --batch-size 8 --max-length 96 --seed 1".split()


def run_labkit(*arguments: object) -> None:
    command = [sys.executable, "-m", "labkit", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]


def write_rows(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def read_rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """task -> (run folder, inputs, what `labkit predict` writes for a file with them).

    The inputs are the eight training examples and one other. Dev and test are other examples, because labkit refuses
    to score the examples that it trains on; the only evaluation is at the last step, so the last weights are kept.
    """
    made: dict[str, tuple[Path, list[dict], list[dict]]] = {}

    def get(task: str) -> tuple[Path, list[dict], list[dict]]:
        if task not in made:
            folder = tmp_path_factory.mktemp(task)
            rows = {"train": ROWS[task], "dev": OTHER_ROWS[task][:2], "test": OTHER_ROWS[task][2:]}
            files = [(f"--{side}-file", write_rows(folder / f"{side}.jsonl", rows[side])) for side in rows]
            run_labkit(
                "train", task, *SETTINGS, *(part for file in files for part in file), "--epochs", STEPS,
                "--evaluate-every", STEPS, "--learning-rate", 1e-3, "--dropout", 0, "--backbone-dropout", 0,
                *(["--null-threshold", 0] if task == "qa" else []), "--output-dir", folder / "run",
            )  # fmt: skip
            inputs = [input_of(task, number, row) for number, row in enumerate([*ROWS[task], OTHER_ROWS[task][0]])]
            source, target = write_rows(folder / "inputs.jsonl", inputs), folder / "predictions.jsonl"
            run_labkit("predict", task, "--model", folder / "run", "--input", source, "--output", target)
            made[task] = folder / "run", inputs, read_rows(target)
        return made[task]

    return get


def input_of(task: str, number: int, row: dict) -> dict:
    fields = {"text": " ".join(row["words"])} if task == "ner" else {name: row[name] for name in INPUTS[task]}
    return {"id": f"row {number}"} | fields


def test_qa_answers_all_eight_questions(trained):
    _, _, predicted = trained("qa")
    assert [row["text"] for row in predicted[:8]] == [answer or "" for _, _, answer in QUESTIONS]


def test_ner_tags_all_eight_sentences(trained):
    _, _, predicted = trained("ner")
    assert [row["tags"] for row in predicted[:8]] == [tags.split() for _, tags in SENTENCES]


def test_classify_labels_all_eight_texts(trained):
    _, _, predicted = trained("classify")
    assert [row["label"] for row in predicted[:8]] == [label for _, label in TEXTS]


def test_embed_retrieves_all_eight_pairs(trained):
    """The similarity of every first text with every second text, so that the ranks do not depend on labkit's scores."""
    pipe = labkit.pipeline(trained("embed")[0])
    pairs = [{"first": first, "second": second} for first, _ in PAIRS for _, second in PAIRS]
    similarity = torch.tensor([row["similarity"] for row in pipe(pairs)]).view(8, 8)
    assert similarity.argmax(dim=1).tolist() == list(range(8))


def test_lm_learns_eight_sentences(tmp_path):
    """The loss of the saved model, computed with plain torch; the first tokens differ, so it can reach 0."""
    for number, story in enumerate(STORIES):
        (tmp_path / f"{number}.txt").write_text(story, encoding="utf-8")
    files = [part for number in range(8) for part in ("--train-file", tmp_path / f"{number}.txt")]
    run_labkit(
        "train", "lm", "--objective", "next", *SETTINGS, *files, "--max-steps", STEPS, "--learning-rate", 2e-3,
        "--dropout", 0, "--output-dir", tmp_path / "run",
    )  # fmt: skip
    lm = labkit.load(tmp_path / "run" / "model", device="cpu", dtype="float32")
    losses = []
    for story in STORIES:
        ids = lm.tokenizer(story, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            logits = lm.model(ids, use_cache=False).logits  # (1, seq, vocab)
        losses.append(F.cross_entropy(logits[0, :-1], ids[0, 1:]))
    assert torch.stack(losses).mean() < 0.05


@pytest.mark.parametrize("task", ROWS)
def test_predict_on_a_file_equals_the_pipeline(trained, task):
    """The file is predicted in padded batches, the pipeline gets one input at a time."""
    run, inputs, predicted = trained(task)
    pipe = labkit.pipeline(run)
    assert [row["id"] for row in predicted] == [row["id"] for row in inputs]
    for row, prediction in zip(inputs, predicted, strict=True):
        assert_same(prediction, json.loads(json.dumps(pipe(row))), where=row["id"])


def assert_same(one: object, other: object, where: str) -> None:
    """Equal, except that numbers may differ by 1e-4: a padded batch rounds differently."""
    if isinstance(one, dict) and isinstance(other, dict):
        assert one.keys() == other.keys(), where
        for name in one:
            assert_same(one[name], other[name], f"{where}, {name}")
    elif isinstance(one, list) and isinstance(other, list):
        assert len(one) == len(other), where
        for number, values in enumerate(zip(one, other, strict=True)):
            assert_same(*values, f"{where}, {number}")
    elif isinstance(one, float):
        assert one == pytest.approx(other, abs=1e-4), where
    else:
        assert one == other, where
