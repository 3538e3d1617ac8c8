"""The embedded labelled data: the shipped files, their cards, each rule of their validators broken, cheap baselines."""

import hashlib
import json
import re
import shutil
import subprocess
import sys
from collections import Counter, defaultdict
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from labkit.datasets import catalogue, embedded, embedded_checks
from labkit.datasets.catalogue import CATALOGUE, check
from labkit.datasets.embedded import SPLITS
from labkit.datasets.files import json_lines
from labkit.datasets.tags import entities_of
from labkit.datasets.words import words_of
from labkit.errors import DataError
from labkit.resources import folder

DATA = folder("data")
SETS = {data.name: data for data in CATALOGUE if data.records is not None}
CARDS = ("field_notes", "evidence", "which_way_round", "known_facts")


@cache
def tagged(split):
    return embedded.read("ner", "field-notes", split)


# ---- what is shipped -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SETS)
def test_the_shipped_files_keep_every_rule_and_are_those_of_their_card(name):
    assert check(SETS[name]) == []


def test_the_counts_of_the_catalogue_are_those_of_the_readers():
    read = {
        "field-notes": sum(b'"id"' in line for line in (DATA / "field_notes/passages.jsonl").read_bytes().split(b"\n")),
        "field-notes-questions": sum(len(embedded.read("qa", "field-notes", split)) for split in SPLITS),
        "field-notes-entities": sum(len(tagged(split)) for split in SPLITS),
        "evidence": len(embedded.posts()),
        "which-way-round": len(embedded.which_way_round()),
        "known-facts": sum(1 for _ in json_lines(DATA / "known_facts/facts.jsonl")),
    }
    assert {name: data.count for name, data in SETS.items()} == read
    assert next(data for data in CATALOGUE if data.name == "gpt2-mini").count is None


def test_counting_and_checking_load_neither_torch_nor_numpy():
    code = (
        "import sys\nfrom labkit.datasets.catalogue import CATALOGUE, check\n"
        "assert not [fault for data in CATALOGUE[:6] if data.count for fault in check(data)]\n"
        "assert not {'torch', 'transformers', 'numpy', 'rapidfuzz'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# ---- the cards -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", CARDS)
def test_a_card_lists_every_other_file_of_its_folder_as_sha256sum_does(place):
    digests = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in (DATA / place).iterdir()}
    listed = re.findall(r"^([0-9a-f]{64})  (\S+)$", (DATA / place / "README.md").read_text(encoding="utf-8"), re.M)
    assert listed == [(digests[name], name) for name in sorted(digests) if name != "README.md"]


def said(place, section):
    """{row: [numbers]} of the tables of numbers in one section of a card."""
    card = (DATA / place / "README.md").read_text(encoding="utf-8")
    text = card.split(f"\n## {section}\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| ([^|]+) \| ([\d.,| ]+) \|$", text, re.M)
    return {name: [float(number.replace(",", "")) for number in numbers.split("|")] for name, numbers in rows}


def with_all(counts):
    """{row: {split: n}} as the tables have it: a column for each split, then the sum."""
    return {name: [*(each[split] for split in SPLITS), each.total()] for name, each in counts.items()}


def test_the_numbers_of_the_card_on_questions_are_those_of_the_files():
    counted = defaultdict(Counter)
    for split in SPLITS:
        for each in embedded.field_notes_questions(split):
            counted["questions"][split] += 1
            counted["without an answer"][split] += not each.answers
            counted["with two or three spans to choose from"][split] += len(each.answers) in (2, 3)
    table = said("field_notes", "Questions")
    assert table.pop("lexical overlap, F1") == [round(overlap_f1(split), 1) for split in SPLITS]
    assert table == with_all(counted)


def test_the_numbers_of_the_card_on_entities_are_those_of_the_files():
    counted, names = defaultdict(Counter), defaultdict(set)
    for split in SPLITS:
        for each in tagged(split):
            found = entities_of(each.tags)
            counted["sentences"][split] += 1
            counted["sentences without an entity"][split] += not found
            counted["words and signs"][split] += len(each.words)
            counted["entities"][split] += len(found)
            for start, end, kind in found:
                counted[kind][split] += 1
                names[split].add(" ".join(each.words[start:end]) if kind != "DATE" else "")
        names[split].discard("")
    assert said("field_notes", "Entities") == with_all(counted)
    dev, test = (f"{len(names[split] & names['train'])} of {len(names[split])} in {split}" for split in SPLITS[1:])
    assert f"{dev} and {test} are labelled in train" in (DATA / "field_notes/README.md").read_text(encoding="utf-8")


def test_the_numbers_of_the_card_of_evidence_are_those_of_the_file():
    counted, by_criterion = defaultdict(Counter), {key: [0, 0] for key in embedded.CRITERIA}
    for post in embedded.posts():
        given = [evidence is not None for _, evidence in post.criteria]
        row = {"posts": 1, "words": len(post.text.split()), "labels": len(given), "labels with evidence": sum(given)}
        row |= {"labels without": len(given) - sum(given)}
        row |= {"posts with evidence for all three": all(given), "posts with evidence for none": not any(given)}
        for name, number in row.items():
            counted[name][post.split] += number
        for criterion, evidence in post.criteria:
            by_criterion[criterion][evidence is None] += 1
    assert said("evidence", "Counts") == with_all(counted)
    card = (DATA / "evidence" / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\w+) \| ([^|]+) \| (\d+) \| (\d+) \|$", card, re.M)
    assert [(key, asked) for key, asked, _, _ in rows] == list(embedded.CRITERIA.items())
    assert {key: [int(found), int(none)] for key, _, found, none in rows} == by_criterion


def test_the_numbers_of_the_card_of_which_way_round_are_those_of_the_file():
    counted, triples = defaultdict(Counter), defaultdict(set)
    for item in embedded.which_way_round():
        triples[f"triples, {item.direction}"].add((item.split, item.group))
        counted["sentences"][item.split] += 1
        counted["words"][item.split] += len(item.text.split())
    counted |= {name: Counter(split for split, _ in found) for name, found in triples.items()}
    assert said("which_way_round", "Counts") == with_all(counted)
    assert said("which_way_round", "What cannot solve it") == {
        name: [round(table_accuracy(key), 3)] for name, key in KEYS.items()
    }


@pytest.fixture
def copy(tmp_path, monkeypatch):
    """A copy of the data folder, without the checkpoints, which the catalogue takes for the real one."""
    for place in CARDS:
        shutil.copytree(DATA / place, tmp_path / place)
    monkeypatch.setattr(catalogue, "folder", lambda name: tmp_path)
    return tmp_path


@pytest.fixture
def card_only(monkeypatch):
    """Every file has the form it should have, says the catalogue: what is left is the card."""
    bare = tuple(replace(data, validate=lambda path: []) for data in CATALOGUE)
    monkeypatch.setattr(catalogue, "CATALOGUE", bare)
    return {data.name: data for data in bare if data.name in SETS}


@pytest.mark.parametrize(
    ("file", "old", "new", "owner"),
    [
        ("field_notes/questions.dev.json", '"version": "v2.0"', '"version":  "v2.0"', "field-notes-questions"),
        ("field_notes/entities.dev.conll", "\n\n", "\n\n\n", "field-notes-entities"),
        ("evidence/posts.jsonl", '"split": "', '"split":  "', "evidence"),
        ("which_way_round/items.jsonl", '"split": "', '"split":  "', "which-way-round"),
        ("known_facts/facts.jsonl", '"split": "', '"split":  "', "known-facts"),
    ],
)
def test_a_file_that_is_not_that_of_its_card_is_told_once_and_by_its_own_set(copy, card_only, file, old, new, owner):
    text = (copy / file).read_text(encoding="utf-8")
    (copy / file).write_bytes(text.replace(old, new, 1).encode())
    faults = {name: check(data) for name, data in card_only.items()}
    ((found, (fault,)),) = [(name, each) for name, each in faults.items() if each]
    assert found == owner
    assert re.search(rf"{re.escape(file)}: is not the file of the card \(sha256 [0-9a-f]{{64}}, the card has", fault)


def test_what_belongs_to_no_set_of_a_folder_is_told_by_its_first(copy, card_only):
    (copy / "field_notes" / "more.txt").write_text("more")
    (copy / "evidence" / "README.md").unlink()
    faults = {name: check(data) for name, data in card_only.items()}
    assert [name for name, each in faults.items() if each] == ["field-notes", "evidence"]
    assert "does not list the sha256 of more.txt" in faults["field-notes"][0]
    assert "README.md: is missing" in faults["evidence"][0]


@pytest.mark.parametrize("name", SETS)
def test_a_missing_file_is_one_error_to_whoever_counts_and_a_fault_to_whoever_checks(copy, name):
    files = [str(file) for file in (copy / SETS[name].place).glob(SETS[name].files)]
    for file in files:
        Path(file).unlink()
    with pytest.raises(DataError, match=rf"({'|'.join(map(re.escape, files))}) could not be read"):
        _ = SETS[name].count
    faults = "\n".join(check(SETS[name]))
    assert all(re.search(rf"^{re.escape(file)}:? could not be read", faults, re.M) for file in files)


# ---- each rule, broken -----------------------------------------------------------------------------------------------


def assert_told(faults, says):
    """Every fault is one of those expected, and each of those is there."""
    says = (says,) if isinstance(says, str) else says
    assert faults
    assert all(any(re.search(words, fault) for words in says) for fault in faults), faults
    assert all(any(re.search(words, fault) for fault in faults) for words in says), faults


def first_span(question):
    return question["answers"][0]["text"], question["answers"][0]["answer_start"]


def answer_of(data, pattern):
    """Make the first answer of the first question the first match of `pattern` in its context."""
    paragraph = data["dev"][0]["paragraphs"][0]
    match = re.search(pattern, paragraph["context"])
    paragraph["qas"][0]["answers"] = [{"text": match[0], "answer_start": match.start()}]


def qas(data, split="dev", article=0):
    return data[split][article]["paragraphs"][0]["qas"]


def unanswerable(data):
    return next(qa for n in range(9) for qa in qas(data, article=n) if not qa["answers"])


def drop(data, wanted, count):
    """Take `count` questions away for which `wanted` is true, one of a passage at most."""
    for split in SPLITS:
        for article in data[split]:
            listed = article["paragraphs"][0]["qas"]
            chosen = next((qa for qa in listed if wanted(qa)), None)
            if count and chosen:
                listed.remove(chosen)
                count -= 1
    assert count == 0


def silence(data, count):
    """Take the answers of `count` questions away."""
    asked = [qa for article in data["train"] for qa in article["paragraphs"][0]["qas"] if qa["answers"]]
    for qa in asked[:count]:
        qa |= {"answers": [], "is_impossible": True}


QUESTION_1 = r"questions\.dev\.json, question 'fn-008-1': "
QUESTIONS = {  # what is broken -> what the validator says of it, and of nothing else
    "answer shifted": (
        lambda d: qas(d)[0]["answers"][0].update(answer_start=first_span(qas(d)[0])[1] + 1),
        (QUESTION_1 + "answer_start is .*, but '.*' is at", "hold 572 questions; expected at least 600"),
    ),
    "no paragraphs": (
        lambda d: d["dev"][0].pop("paragraphs"),
        (r"questions\.dev\.json, row 1: has no context", "hold 572 questions"),
    ),
    "context": (
        lambda d: d["dev"][0]["paragraphs"][0].update(context=d["dev"][0]["paragraphs"][0]["context"] + " More."),
        r"questions\.dev\.json, question 'fn-008-[1-4]': its context is not the text of fn-008",
    ),
    "title": (
        lambda d: d["dev"][0].update(title="fn-999"),
        ("its title is 'fn-999', which is the id of no passage", "passage fn-008: has no question"),
    ),
    "title of another": (
        lambda d: d["dev"][0].update(title=d["dev"][1]["title"]),
        ("its context is not the text of", "passage fn-008: has no question"),
    ),
    "split": (
        lambda d: d["test"].append(d["dev"].pop(0)),
        (r"questions\.test\.json, question .* is a passage of the split dev", "passage fn-008: has no question"),
    ),
    "id of another split": (
        lambda d: qas(d)[0].update(id=qas(d, "train")[0]["id"]),
        r"questions\.dev\.json, question '.*': has an id that a question in questions\.train\.json has already",
    ),
    "id twice": (  # the reader refuses it
        lambda d: qas(d)[1].update(id=qas(d)[0]["id"]),
        (r"questions\.dev\.json, .*'fn-008-1'", r"'fn-008-1'|hold 572 questions"),
    ),
    "question twice": (
        lambda d: qas(d)[1].update(question=qas(d)[0]["question"].upper()),
        r"question 'fn-008-2': asks of fn-008 what another question asks",
    ),
    "no question mark": (
        lambda d: qas(d)[0].update(question="Tell me"),
        QUESTION_1 + "'Tell me' should end with a question mark",
    ),
    "space before an answer": (lambda d: answer_of(d, r" \w+"), "the answer ' .*' has white space around it"),
    "space after an answer": (lambda d: answer_of(d, r"\w+ "), "the answer '.* ' has white space around it"),
    "13 words": (lambda d: answer_of(d, r"(\S+\s+){12}\S+"), "has 13 words; expected 12 at most"),
    "marked impossible": (
        lambda d: qas(d)[0].update(is_impossible=True),
        (QUESTION_1 + "is_impossible is true, but there is the answer", "hold 572 questions"),
    ),
    "not marked": (
        lambda d: unanswerable(d).pop("is_impossible"),
        "is_impossible is None, and the question has 0 answers",
    ),
    "marked possible": (
        lambda d: unanswerable(d).update(is_impossible=False),
        ("has no answer, but is_impossible is false", "hold 572 questions"),
    ),
    "599 questions": (
        lambda d: drop(d, lambda qa: qa["answers"], 73),
        r"field_notes, all splits: hold 599 questions; expected at least 600",
    ),
    "too few impossible": (
        lambda d: drop(d, lambda qa: not qa["answers"], 50),
        "all splits: 14% of the questions have no answer; expected 15% to 25%",
    ),
    "too many impossible": (lambda d: silence(d, 40), "all splits: 26% of the questions have no answer"),
}


@pytest.mark.parametrize("kind", QUESTIONS)
def test_a_fault_in_the_questions_is_named(copy, kind):
    breaks, says = QUESTIONS[kind]
    paths = {split: copy / "field_notes" / f"questions.{split}.json" for split in SPLITS}
    data = {split: json.loads(path.read_text(encoding="utf-8")) for split, path in paths.items()}
    breaks({split: each["data"] for split, each in data.items()})
    for split, path in paths.items():
        path.write_text(json.dumps(data[split], ensure_ascii=False), encoding="utf-8")
    assert_told(embedded_checks.validate_questions(copy / "field_notes"), says)


def lines_of(file):
    return [json.loads(line) for line in (DATA / file).read_text(encoding="utf-8").splitlines()]


@cache
def few():
    """(passages, {split: columns}) of the first three passages of each split."""
    rows = lines_of("field_notes/passages.jsonl")
    kept = [row for split in SPLITS for row in [each for each in rows if each["split"] == split][:3]]
    columns = {split: documents(DATA / "field_notes" / f"entities.{split}.conll") for split in SPLITS}
    ids = {row["id"] for row in kept}
    return kept, {split: [d for d in each if d.split("\n")[0] in ids] for split, each in columns.items()}


@pytest.fixture
def place(tmp_path):
    """A small copy of the folder field_notes: three passages of each split, and their columns."""
    rows, columns = few()
    (tmp_path / "passages.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    for split in SPLITS:
        write_documents(tmp_path / f"entities.{split}.conll", columns[split])
    assert embedded_checks.validate_entities(tmp_path) == []
    return tmp_path


def documents(path):
    return path.read_text(encoding="utf-8").split("# document = ")[1:]


def write_documents(path, found):
    path.write_text("".join(f"# document = {each.rstrip()}\n\n" for each in found), encoding="utf-8")


DOCUMENT = r"entities\.dev\.conll, document fn-008: "
ENTITIES = {  # (what to look for, what to put there; once) in the columns of dev -> what is said
    "a word changed": ((r"\nwill\tO", "\nwould\tO"), DOCUMENT + r"word 4 is 'would', and the passage has 'will'"),
    "a word lost": ((r"\nwill\tO", ""), DOCUMENT + "word 4 is 'row', and the passage has 'will'"),
    "a word more": ((r"\nwill\tO", "\nwill\tO\nwill\tO"), DOCUMENT + "word 5 is 'will', and the passage has 'row'"),
    "the last word lost": (
        (r"\n[^\n]+\n\n(?=# document)", "\n\n"),
        DOCUMENT + r"word \d+ is None, and the passage has",
    ),
    "kind": ((r"B-ORG\n", "B-GPE\n"), "line 2: the kind is 'GPE'; expected PER, ORG, LOC, DATE, MISC"),
    "letter": ((r"B-ORG\n", "S-ORG\n"), "line 2: the tag is 'S-ORG'; expected O, B- or I-"),
    "no tag at all": ((r"B-ORG\n", "ORG\n"), "line 2: has the tag 'ORG'"),
    "I after O": (
        (r"\nwill\tO", "\nwill\tI-PER"),
        "line 5: the tag I-PER follows B-ORG|line 5: the tag I-PER follows O",
    ),
    "I after another kind": (
        (r"I-LOC\n", "I-ORG\n"),
        r"line \d+: the tag I-ORG follows B-LOC; an entity begins with B-ORG",
    ),
    "I at the start": ((r"\tB-ORG\n", "\tI-ORG\n"), "line 2: the tag I-ORG follows O"),
    "I after a sentence": (
        (r"(\tO\n\nThe)\tO", r"\1\tI-MISC"),
        r"line \d+: the tag I-MISC follows O; an entity begins with B-MISC",
    ),
    "an entity cut by a sentence": ((r"\nIloru\tI-LOC", "\n\nIloru\tI-LOC"), r"line \d+: the tag I-LOC follows O"),
    "columns": (
        (r"\nwill\tO", "\nwill\tMD\tO"),
        r"line 5: has 3 columns, and the other lines have 2",
    ),
    "spaces": ((r"\nwill\tO", "\nwill O"), (r"line 5: is 'will O'; expected a word, one tab", DOCUMENT + "word 4 is")),
    "one column": ((r"\nwill\tO", "\nwill"), r"line 5: has one column \('will'\)"),
    "no document": (
        (r"\A# document = fn-008\n", ""),
        (r"line \d+: stands before the first document", DOCUMENT + "is missing"),
    ),
    "unknown document": (
        (r"= fn-008\n", "= fn-999\n"),
        ("document fn-999: is the id of no passage", "fn-008: is missing"),
    ),
    "twice": (
        (r"\Z", "\n# document = fn-008\nMore\tO\n"),
        (r"line \d+: the document fn-008 began before", DOCUMENT + r"word \d+ is 'More', and the passage has None"),
    ),
    "none": ((r"\A.*?(?=\n# document)", ""), DOCUMENT + "is missing"),
}


@pytest.mark.parametrize("kind", ENTITIES)
def test_a_fault_in_the_entities_is_named(place, kind):
    (pattern, text), says = ENTITIES[kind]
    path = place / "entities.dev.conll"
    broken, count = re.subn(pattern, text, path.read_text(encoding="utf-8"), count=1, flags=re.S)
    assert count == 1
    path.write_text(broken, encoding="utf-8")
    assert_told(embedded_checks.validate_entities(place), says)


def test_a_passage_in_the_columns_of_another_split_is_named(place):
    dev, test = (place / f"entities.{split}.conll" for split in ("dev", "test"))
    first, *others = documents(dev)
    write_documents(dev, others)
    write_documents(test, [*documents(test), first])
    says = (r"entities\.test\.conll, document fn-008: is a passage of the split dev", DOCUMENT + "is missing")
    assert_told(embedded_checks.validate_entities(place), says)


def test_a_passage_without_an_entity_is_named(place):
    path = place / "entities.dev.conll"
    first, *others = documents(path)
    write_documents(path, [re.sub(r"\t.*", "\tO", first), *others])
    assert_told(embedded_checks.validate_entities(place), DOCUMENT + "has no entity")


@pytest.mark.parametrize("damage", ["{", '{"id": "fn-001"}', '{"id": 7}'])
@pytest.mark.parametrize("validate", [embedded_checks.validate_questions, embedded_checks.validate_entities])
def test_damaged_passages_are_the_one_fault_of_what_is_held_against_them(place, validate, damage):
    path = place / "passages.jsonl"
    path.write_text(path.read_text(encoding="utf-8") + damage, encoding="utf-8")
    (found,) = validate(path.parent)
    assert re.search(r"passages\.jsonl, line 10: (is not JSON|has the keys id; expected id, split, region)", found)


def label(rows, n=6):
    """The first criterion with evidence in row `n`."""
    return next(each for each in rows[n]["criteria"] if each["evidence"])


def set_label(rows, **fields):
    label(rows).update(fields)


def post(rows, change):
    rows[6]["post"] = change(rows[6]["post"])


def quiet(rows, split, count):
    """Take `count` pieces of evidence away from a split."""
    given = [each for row in rows if row["split"] == split for each in row["criteria"] if each["evidence"]]
    for each in given[:count]:
        each["evidence"] = None


def move(rows, old, new):
    for row in rows:
        row["split"] = row["split"].replace(old, new)


POSTS = {
    "key": (
        lambda r: r[6].pop("split"),
        ("line 7: has the keys id, post, criteria; expected id, split, post, criteria",),
    ),
    "key more": (lambda r: r[6].update(author="me"), "line 7: has the keys .*, author; expected"),
    "type": (lambda r: r[6].update(post=7), "line 7: post should be of the type str"),
    "no list": (lambda r: r[6].update(criteria={}), "line 7: criteria should be of the type list"),
    "id": (lambda r: r[6].update(id=r[2]["id"]), "line 7: has the id of line 3 again"),
    "post": (
        lambda r: (
            r[6].update(post=f"{r[2]['post']}\n".upper().strip(), criteria=r[6]["criteria"])
            or quiet(r[6:7], "train", 3)
        ),
        "line 7: has the post of line 3 again",
    ),
    "split": (lambda r: r[6].update(split="valid"), "line 7: the split is 'valid'; expected train, dev, test"),
    "unknown": (lambda r: set_label(r, criterion="mood"), "line 7: the criterion is 'mood'; expected low_mood, "),
    "twice": (
        lambda r: r[6]["criteria"][1].update(criterion=r[6]["criteria"][0]["criterion"]),
        r"line 7: has the criterion \w+ twice",
    ),
    "two criteria": (lambda r: r[6]["criteria"].pop(), "line 7: has 2 criteria; expected 3"),
    "no object": (
        lambda r: r[6]["criteria"].__setitem__(0, "sleep"),
        "line 7: has among its criteria 'sleep'; expected",
    ),
    "no evidence key": (lambda r: label(r).pop("evidence"), r"line 7: has among its criteria \{'criterion': '\w+'\}"),
    "evidence no text": (lambda r: set_label(r, evidence=["So."]), r"line 7: has among its criteria \{.*\['So\.'\]\}"),
    "not there": (
        lambda r: set_label(r, evidence=label(r)["evidence"] + "!"),
        r"line 7: the evidence for \w+, .*, stands 0 times in the post; expected once",
    ),
    "there twice": (
        lambda r: post(r, lambda p: f"{p} {label(r)['evidence']}"),
        "line 7: .* stands 2 times in the post",
    ),
    "its first word lost": (
        lambda r: set_label(r, evidence=label(r)["evidence"].split(" ", 1)[1]),
        "line 7: .* is not a whole sentence of the post",
    ),
    "its last word lost": (
        lambda r: set_label(r, evidence=label(r)["evidence"].rsplit(" ", 1)[0]),
        "line 7: .* is not a whole sentence of the post",
    ),
    "empty": (lambda r: set_label(r, evidence=""), "line 7: .* should be a sentence without white space around it"),
    "space": (
        lambda r: set_label(r, evidence=label(r)["evidence"] + " "),
        "line 7: .* should be a sentence without white space around it",
    ),
    "for two": (
        lambda r: [each.update(evidence=label(r)["evidence"]) for each in r[6]["criteria"]],
        r"line 7: has the same evidence for \w+ and for another criterion",
    ),
    "mark": (lambda r: post(r, lambda p: f"{p} [POST]"), r"line 7: the post holds the mark \[POST\]"),
    "space at the end": (lambda r: post(r, lambda p: f"{p}\n"), "line 7: the post has white space around it"),
    "141 words": (
        lambda r: post(r, lambda p: p + " so" * (141 - len(p.split()))),
        "line 7: the post has 141 words; expected 50 to 140",
    ),
    "a short one": (
        lambda r: (post(r, lambda p: "So it is."), quiet(r[6:7], "train", 3)),
        "line 7: the post has 3 words; expected 50 to 140",
    ),
    "199 posts": (lambda r: r.__delitem__(slice(0, 17)), "whole file: holds 199 posts; expected at least 200"),
    "no test": (lambda r: move(r, "test", "train"), "whole file: has no post of the split test"),
    "few with evidence": (lambda r: quiet(r, "dev", 20), r"whole file: 40% of the labels of dev|whole file: 3\d% of"),
}


@pytest.fixture
def write(tmp_path):
    """write(rows) -> the path of a JSONL file that holds them."""

    def write(rows):
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
        return path

    return write


@pytest.mark.parametrize("kind", POSTS)
def test_a_fault_in_the_posts_is_named(write, kind):
    breaks, says = POSTS[kind]
    rows = lines_of("evidence/posts.jsonl")
    breaks(rows)
    assert_told(embedded_checks.validate_posts(write(rows)), says)


@pytest.mark.parametrize("mark", [".", "!", "?", ".)", '."', ".”", "…", " \N{SNAIL}", ":"])
def test_a_sentence_may_stand_after_any_mark_and_at_a_line_break(write, mark):
    rows = lines_of("evidence/posts.jsonl")
    filling = " ".join(["word"] * 50)
    quiet(rows[6:7], "train", 3)
    for text in (f"{filling}{mark} I sat.", f"I sat{mark} {filling}.", f"{filling}\nI sat", f"I sat\n\n{filling}"):
        evidence = "I sat." if text.endswith("I sat.") else f"I sat{mark}" if "\n" not in text else "I sat"
        rows[6]["post"] = text
        rows[6]["criteria"][0]["evidence"] = evidence
        assert embedded_checks.validate_posts(write(rows)) == []


def group(rows, direction, n=0):
    """The three items of the n-th group of one direction in train."""
    names = list(
        dict.fromkeys(row["group"] for row in rows if row["direction"] == direction and row["split"] == "train")
    )
    return [row for row in rows if row["group"] == names[n]]


def rename(rows, direction):
    """Give the items of one group the name of another."""
    other = group(rows, direction, 1)[0]
    name = other["text"][other["start"] : other["end"]]
    for row in group(rows, direction):
        row["text"] = row["text"][: row["start"]] + name + row["text"][row["end"] :]
        row["end"] = row["start"] + len(name)


def again(rows):
    row = group(rows, "after")[0]
    row["text"] += f" {row['text'][row['start'] : row['end']]}."


def same_text(rows):
    first, second, _ = group(rows, "after")
    second["text"] = first["text"]


def other_word(rows, direction):
    """Change the shared side of one of three: its first letter, or its last mark."""
    row = next(g[0] for n in range(9) if (g := group(rows, direction, n)) and (direction == "before" or g[0]["start"]))
    row["text"] = row["text"][0].swapcase() + row["text"][1:] if direction == "after" else row["text"][:-1] + " so."


def drop_groups(rows, count):
    names = {group(rows, "after", n)[0]["group"] for n in range(count)}
    rows[:] = [row for row in rows if row["group"] not in names]


def no_test_before(rows):
    for row in rows:
        if row["direction"] == "before" and row["split"] == "test":
            row["split"] = "dev"


def items(rows, **fields):
    group(rows, "after")[0].update(fields)


def text(rows, change):
    items(rows, text=change(group(rows, "after")[0]["text"]))


IN_GROUP = r"rows\.jsonl, group after-31: "
BALANCE = "train, after: holds 3[5-7] PER, 3[5-7] LOC, 3[5-7] ORG; expected as many of each kind"
ITEMS = {
    "key": (
        lambda r: r[6].pop("group"),
        ("line 7: has the keys", "group .* has the labels .*; expected", "holds 3[56] PER"),
    ),
    "type": (
        lambda r: r[6].update(start="1"),
        ("line 7: start should be", "has the labels .*; expected", "holds 3[56] PER"),
    ),
    "id": (lambda r: r[6].update(id=r[2]["id"]), "line 7: has the id of line 3 again"),
    "text": (same_text, r"line 2: has the text of line 1 again"),
    "split": (
        lambda r: items(r, split="valid"),
        ("line 1: the split is 'valid'", IN_GROUP + "lies in more than one split: train, valid", BALANCE),
    ),
    "split of a group": (
        lambda r: items(r, split="dev"),
        (IN_GROUP + "lies in more than one split: dev, train", BALANCE, "dev, after: holds 1[89]"),
    ),
    "direction": (
        lambda r: r[1].update(direction="left"),
        ("line 2: the direction is 'left'; expected after, before", "in more than one direction: after, left", BALANCE),
    ),
    "direction of a group": (
        lambda r: r[1].update(direction="before"),
        ("lies in more than one direction: after, before", BALANCE, "train, before: holds 3[67]"),
    ),
    "label": (
        lambda r: items(r, label="GPE"),
        ("line 1: the label is 'GPE'; expected PER, LOC, ORG", IN_GROUP + "has the labels GPE", BALANCE),
    ),
    "label of another": (
        lambda r: items(r, label="ORG"),
        (IN_GROUP + "has the labels ORG, ORG, LOC; expected one each of PER, LOC, ORG", BALANCE),
    ),
    "two of a group": (lambda r: r.pop(0), (IN_GROUP + "has the labels ORG, LOC; expected", BALANCE)),
    "not ASCII": (
        lambda r: text(r, lambda t: t[:-1] + "é."),
        "line 1: the text holds other characters than printable ASCII",
    ),
    "line break": (lambda r: text(r, lambda t: t[:-1] + "\nso."), "line 1: the text holds other characters"),
    "no full stop": (lambda r: text(r, lambda t: t[:-1]), "line 1: the text should end with a full stop"),
    "space": (
        lambda r: text(r, lambda t: t + " "),
        "line 1: the text should end with a full stop, without white space",
    ),
    "half a name": (
        lambda r: items(r, end=35),
        (
            r"line 1: text\[28:35\] is 'Gauneri', which is not one word",
            IN_GROUP + "should have one text up to the name",
        ),
    ),
    "two words": (
        lambda r: items(r, start=19),
        r"line 1: text\[19:36\] is 'footnote, Gauneris', which is not one word|line 1: text\[19:36\] is",
    ),
    "outside": (
        lambda r: items(r, start=900, end=908),
        (r"line 1: text\[900:908\] is ''", IN_GROUP + "should have one"),
    ),
    "negative": (lambda r: items(r, start=-8), r"line 1: text\[-8:36\] is .*, which is not one word"),
    "name twice": (again, "line 1: the name 'Gauneris' stands 2 times in the text; expected once"),
    "before the name": (lambda r: other_word(r, "after"), "should have one text up to the name, and has 2"),
    "after the name": (
        lambda r: other_word(r, "before"),
        "group before-.* should have one text from the name, and has 2",
    ),
    "one name in two groups": (
        lambda r: rename(r, "after"),
        r"group after-\d\d: has the name '\w+', as the group after-31",
    ),
    "399 items": (lambda r: drop_groups(r, 11), "whole file: holds 399 items; expected at least 400"),
    "none of a direction": (no_test_before, "test, before: holds 0 PER, 0 LOC, 0 ORG; expected .*, and some"),
}


@pytest.mark.parametrize("kind", ITEMS)
def test_a_fault_in_the_items_is_named(write, kind):
    breaks, says = ITEMS[kind]
    rows = lines_of("which_way_round/items.jsonl")
    breaks(rows)
    assert_told(embedded_checks.validate_items(write(rows)), says)


@pytest.mark.parametrize("validate", [embedded_checks.validate_posts, embedded_checks.validate_items])
@pytest.mark.parametrize(
    ("content", "says"),
    [(b'{"id": "', "line 1: is not JSON"), (b"", "is empty"), (b"\xff\xfe", "line 1: is not UTF-8")],
)
def test_a_file_that_is_no_jsonl_is_a_fault_in_words(tmp_path, validate, content, says):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    assert re.search(rf"rows\.jsonl,? {says}", validate(path)[0])


def test_faults_are_told_in_the_order_of_the_lines(write):
    rows = lines_of("evidence/posts.jsonl")
    for n in (30, 4, 17):
        rows[n]["split"] = "valid"
    rows[9]["id"] = rows[3]["id"]
    found = embedded_checks.validate_posts(write(rows))
    assert [int(re.search(r"line (\d+):", fault)[1]) for fault in found] == [5, 10, 18, 31]


# ---- what must not solve them ----------------------------------------------------------------------------------------


def normal_words(text):
    """As SQuAD's script compares: lower case, without punctuation and articles."""
    return [word for word in re.sub(r"[^\w\s]", "", text.lower()).split() if word not in ("a", "an", "the")]


def overlap_f1(split):
    """F1, in percent, of answering with the sentence that shares the most different words with the question."""
    scores = []
    for each in embedded.field_notes_questions(split):
        asked, best = set(normal_words(each.question)), []
        for sentence in re.split(r"(?<=[.!?])\s+|\n+", each.context):
            words = normal_words(sentence)
            if not best or len(asked & set(words)) > len(asked & set(best)):
                best = words
        f1 = [0.0]
        for answer in each.answers:
            wanted = normal_words(answer.text)
            common = sum((Counter(best) & Counter(wanted)).values())
            f1.append(2 * common / (len(best) + len(wanted)))
        scores.append(max(f1))
    return 100 * sum(scores) / len(scores)


@pytest.mark.parametrize("split", SPLITS)
def test_the_words_of_a_question_do_not_give_its_answer_away(split):
    assert overlap_f1(split) < 40


KEYS = {  # the rows of the card's table
    "the name": lambda item: item.text[item.start : item.end],
    "the shared side, with the name": lambda item: (
        item.text[: item.end] if item.direction == "after" else item.text[item.start :]
    ),
    "the number of words and signs before the name": lambda item: len(words_of(item.text[: item.start])),
}


def table_accuracy(key, direction=None):
    """Accuracy on test of a table, learnt from train, of the most frequent label for each key.

    A key that train does not have gets train's most frequent label; of two equally frequent, the first in the alphabet.
    """
    table = defaultdict(Counter)
    train, test = (embedded.which_way_round(split, direction) for split in ("train", "test"))
    overall = Counter(item.label for item in train)
    for item in train:
        table[key(item)][item.label] += 1
    right = 0
    for item in test:
        counts = table.get(key(item), overall)
        right += item.label == min(counts, key=lambda label: (-counts[label], label))
    return right / len(test)


@pytest.mark.parametrize("key", KEYS)
def test_neither_the_name_nor_its_place_gives_the_kind_away(key):
    assert abs(table_accuracy(KEYS[key]) - 1 / 3) < 0.05
    for direction in embedded.DIRECTIONS:
        assert table_accuracy(KEYS[key], direction) < 1 / 3 + 0.05


def test_the_table_does_learn_where_there_is_something_to_learn():
    assert table_accuracy(lambda item: item.label) == 1.0


def test_titles_and_passages_are_pairs_to_be_found_again():
    for split, count in (("train", 118), ("dev", 25), ("test", 25)):
        pairs = embedded.read("embed", "field-notes", split)
        assert len(pairs) == count == len({pair.second for pair in pairs})
        assert all(pair.score is None and pair.first and pair.group == pair.id for pair in pairs)
