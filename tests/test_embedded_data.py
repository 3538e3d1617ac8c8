"""The embedded data sets: `labkit data`, the sha256 of the cards, what the cards promise of two sets."""

import json
import re
import shutil
from collections import Counter, defaultdict

import pytest

from labkit.datasets import embedded
from labkit.datasets.embedded import SHIPPED
from labkit.datasets.evidence import CRITERIA, MARKS
from labkit.datasets.examples import words_of
from tests.cards import DATA, SPLITS, counts, rows_of, table

CARDS = sorted(path.parent for path in DATA.glob("*/README.md"))
POSTS, ITEMS = rows_of("evidence/posts.jsonl"), rows_of("which_way_round/items.jsonl")


# ---- labkit data, and the cards --------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", CARDS, ids=lambda place: place.name)
def test_a_card_lists_every_other_file_as_sha256sum_prints_it(place):
    files = sorted(path.name for path in place.iterdir() if path.name != "README.md")
    listed = re.findall(r"^[0-9a-f]{64}  (\S+)$", (place / "README.md").read_text(encoding="utf-8"), re.M)
    assert listed == files


def test_the_list_has_the_number_of_records_in_the_files(labkit_command):
    listed = {entry["name"]: entry for entry in json.loads(labkit_command("data", "list", "--json")[1])}
    for name, entry in listed.items():
        if entry["path"].endswith(".jsonl"):
            assert entry["count"] == len(rows_of(entry["path"].removeprefix(f"{DATA}/"))), name
    for task, name in (("qa", "field-notes-questions"), ("ner", "field-notes-entities")):
        examples = [example for split in SPLITS for example in embedded.read(task, "field-notes", split)]
        assert listed[name]["count"] == len(examples)
    code, out, _ = labkit_command("data", "list")
    assert code == 0 and all(entry["licence"] in out and entry["path"] in out for entry in listed.values())


def test_what_is_shipped_is_in_order(labkit_command):
    names = [data.name for data in SHIPPED]
    assert labkit_command("data", "check") == (0, "".join(f"{name}: in order\n" for name in names), "")
    code, out, _ = labkit_command("data", "check", "--json")
    assert (code, json.loads(out)) == (0, [{"name": name, "ok": True, "faults": []} for name in names])


@pytest.mark.parametrize(
    ("file", "content", "damaged", "words"),
    [
        ("passages.jsonl", "x", 1, "passages.jsonl is not the file"),
        ("entities.dev.conll", None, 1, "dev.conll is missing"),
        ("README.md", None, 3, "README.md is missing"),
        ("README.md", "# Notes", 3, "lists no sha256"),
    ],
)
def test_damaged_data_is_named_with_exit_code_1(labkit_command, tmp_path, monkeypatch, file, content, damaged, words):
    shutil.copytree(DATA, tmp_path / "data")
    monkeypatch.setattr(embedded, "folder", lambda name: tmp_path / "data")
    path = tmp_path / "data" / "field_notes" / file
    path.unlink()
    if content:
        path.write_text(content)
    code, out, _ = labkit_command("data", "check", "--json")
    faults = {entry["name"]: entry["faults"] for entry in json.loads(out) if not entry["ok"]}
    assert code == 1 and len(faults) == damaged and all(name.startswith("field-notes") for name in faults)
    assert all(len(messages) == 1 and words in messages[0] for messages in faults.values())


# ---- Evidence --------------------------------------------------------------------------------------------------------


def test_each_post_has_the_form_of_the_card_and_its_evidence_is_a_part_of_it():
    assert len({" ".join(row["post"].split()).casefold() for row in POSTS}) == len(POSTS)
    for row in POSTS:
        post, criteria = row["post"], [label["criterion"] for label in row["criteria"]]
        assert not [mark for mark in MARKS if mark in post], row["id"]
        assert len(set(criteria)) == 3 and set(criteria) <= set(CRITERIA), row["id"]
        given = [label["evidence"] for label in row["criteria"] if label["evidence"] is not None]
        assert len(set(given)) == len(given), row["id"]
        for evidence in given:
            assert evidence and evidence == evidence.strip() and post.count(evidence) == 1, row["id"]


def test_the_numbers_of_the_card_of_evidence_are_those_of_the_file():
    counted, by_criterion = defaultdict(Counter), {key: [0, 0] for key in CRITERIA}
    for row in POSTS:
        given = [label["evidence"] is not None for label in row["criteria"]]
        numbers = {"posts": 1, "words": len(row["post"].split()), "labels": 3, "labels with evidence": sum(given)}
        numbers |= {"labels without": 3 - sum(given)}
        numbers |= {"posts with evidence for all three": all(given), "posts with evidence for none": not any(given)}
        for name, number in numbers.items():
            counted[name][row["split"]] += number
        for label in row["criteria"]:
            by_criterion[label["criterion"]][label["evidence"] is None] += 1
    assert table("evidence", "Counts") == counts(counted)
    card = (DATA / "evidence" / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\w+) \| ([^|]+) \| (\d+) \| (\d+) \|$", card, re.M)
    assert [(key, asked) for key, asked, _, _ in rows] == list(CRITERIA.items())
    assert {key: [int(with_evidence), int(none)] for key, _, with_evidence, none in rows} == by_criterion


# ---- Which way round -------------------------------------------------------------------------------------------------


def test_the_three_sentences_of_a_triple_share_the_name_and_its_other_side():
    groups, names, counted, triples = defaultdict(list), Counter(), defaultdict(Counter), defaultdict(set)
    for row in ITEMS:
        text, start, end = row["text"], row["start"], row["end"]
        assert (start, end) in words_of(text) and text.count(text[start:end]) == 1, row["id"]
        assert row["id"] == f"{row['group']}-{row['label']}" and row["split"] in SPLITS
        groups[row["group"]].append(row)
        triples[f"triples, {row['direction']}"].add((row["split"], row["group"]))
        counted["sentences"][row["split"]] += 1
        counted["words"][row["split"]] += len(text.split())
    for group, rows in groups.items():
        assert sorted(row["label"] for row in rows) == ["LOC", "ORG", "PER"], group
        assert len({(row["split"], row["direction"]) for row in rows}) == 1, group
        assert len({shared_side(row) for row in rows}) == 1, group
        names[rows[0]["text"][rows[0]["start"] : rows[0]["end"]]] += 1
    assert max(names.values()) == 1 and len({row["text"] for row in ITEMS}) == len(ITEMS)
    counted |= {name: Counter(split for split, _ in groups) for name, groups in triples.items()}
    assert table("which_way_round", "Counts") == counts(counted)


def shared_side(row):
    return {"after": row["text"][: row["end"]], "before": row["text"][row["start"] :]}[row["direction"]]


KEYS = {  # the rows of the card's table
    "the name": lambda row: row["text"][row["start"] : row["end"]],
    "the shared side, with the name": shared_side,
    "the number of words and signs before the name": lambda row: len(words_of(row["text"][: row["start"]])),
}


def table_accuracy(key, directions=("after", "before")):
    """Accuracy on test of a table, learnt from train, of the most frequent label for each key.

    A key that train does not have gets train's most frequent label; of two equally frequent, the first in the alphabet.
    """
    learnt, overall, right = defaultdict(Counter), Counter(), []
    for row in ITEMS:
        if row["split"] == "train" and row["direction"] in directions:
            learnt[key(row)][row["label"]] += 1
            overall[row["label"]] += 1
    for row in ITEMS:
        if row["split"] == "test" and row["direction"] in directions:
            seen = learnt.get(key(row), overall)
            right.append(row["label"] == min(seen, key=lambda label: (-seen[label], label)))
    return sum(right) / len(right)


def test_neither_the_name_nor_its_place_gives_the_kind_away():
    stated = table("which_way_round", "What cannot solve it", ("accuracy",))
    assert stated == {name: {"accuracy": round(table_accuracy(key), 3)} for name, key in KEYS.items()}
    for key in KEYS.values():
        assert all(table_accuracy(key, [direction]) < 1 / 3 + 0.05 for direction in ("after", "before"))
    assert table_accuracy(lambda row: row["label"]) == 1.0, "where there is something to learn, the table learns it"
