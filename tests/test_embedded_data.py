"""The data that labkit ships: `labkit data`, its readers, and what the cards promise of the files."""

import json
import re
import shutil
from collections import Counter, defaultdict

import pytest

from labkit.datasets import embedded
from labkit.datasets.embedded import SHIPPED, SPLITS
from labkit.datasets.evidence import CRITERIA, MARKS
from labkit.datasets.examples import Entity, entities_in, entities_of, words_of
from labkit.errors import DataError
from labkit.files import folder
from tests.data_files import rows_of

DATA = folder("data")
PASSAGES, POSTS = rows_of(DATA / "field_notes/passages.jsonl"), rows_of(DATA / "evidence/posts.jsonl")
ITEMS, FACTS = rows_of(DATA / "which_way_round/items.jsonl"), rows_of(DATA / "known_facts/facts.jsonl")
TEXTS = {row["id"]: row["text"] for row in PASSAGES}
SPLIT_OF = {row["id"]: row["split"] for row in PASSAGES}


def card(place: str) -> str:
    return (DATA / place / "README.md").read_text(encoding="utf-8")


def table(place: str, section: str, splits: tuple[str, ...] = SPLITS) -> dict[str, Counter]:
    """{row: {split: number}} of the tables of one section of a card; their last column, the sum, is checked here."""
    text = card(place).split(f"\n## {section}\n")[1].split("\n## ")[0]
    rows = {}
    for name, cells in re.findall(r"^\| ([^|]+) \| ([\d.,| ]+) \|$", text, re.M):
        numbers = [float(cell.replace(",", "")) for cell in cells.split("|")]
        if len(numbers) > len(splits):
            assert numbers.pop() == sum(numbers), name
        rows[name] = Counter(dict(zip(splits, numbers, strict=True)))
    return rows


def sums(numbers_by_split: list[tuple[str, dict[str, float]]]) -> dict[str, Counter]:
    """{name: {split: sum}} of (split, {name: number}), in the form of `table`."""
    totals = defaultdict(Counter)
    for split, numbers in numbers_by_split:
        for name, number in numbers.items():
            totals[name][split] += number
    return totals


# ---- labkit data, the cards, the readers -----------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(DATA.glob("*/README.md")), ids=lambda path: path.parent.name)
def test_a_card_lists_every_other_file_as_sha256sum_prints_it(path):
    files = sorted(file.name for file in path.parent.iterdir() if file != path)
    assert re.findall(r"^[0-9a-f]{64}  (\S+)$", path.read_text(encoding="utf-8"), re.M) == files


def test_what_is_shipped_is_listed_with_its_number_of_records_and_is_in_order(labkit_command):
    listed = {entry["name"]: entry for entry in json.loads(labkit_command("data", "list", "--json")[1])}
    counts = {name: entry["count"] for name, entry in listed.items()}
    rows = (("field-notes", PASSAGES), ("evidence", POSTS), ("which-way-round", ITEMS), ("known-facts", FACTS))
    assert all(counts[name] == len(its_rows) for name, its_rows in rows)
    for task, name in (("qa", "field-notes-questions"), ("ner", "field-notes-entities")):
        assert counts[name] == sum(len(embedded.read(task, "field-notes", split)) for split in SPLITS)
    out = labkit_command("data", "list")[1]
    assert all(entry["licence"] in out and entry["path"] in out for entry in listed.values())
    names = [data.name for data in SHIPPED]
    assert labkit_command("data", "check") == (0, "".join(f"{name}: in order\n" for name in names), "")
    code, out, _ = labkit_command("data", "check", "--json")
    assert (code, json.loads(out)) == (0, [{"name": name, "ok": True, "faults": []} for name in names])


@pytest.mark.parametrize(
    ("file", "content", "damaged"),
    [("passages.jsonl", "x", 1), ("entities.dev.conll", None, 1), ("README.md", None, 3)],
)
def test_damaged_data_is_named_with_exit_code_1(labkit_command, tmp_path, monkeypatch, file, content, damaged):
    shutil.copytree(DATA, tmp_path / "data")
    monkeypatch.setattr(embedded, "folder", lambda name: tmp_path / "data")
    path = tmp_path / "data" / "field_notes" / file
    path.unlink()
    if content:
        path.write_text(content)
    code, out, _ = labkit_command("data", "check", "--json")
    faults = {entry["name"]: entry["faults"] for entry in json.loads(out) if not entry["ok"]}
    assert code == 1 and len(faults) == damaged and all(name.startswith("field-notes") for name in faults)
    assert all(len(messages) == 1 and messages[0].startswith(f"{path} is ") for messages in faults.values())


def test_passages_are_read_as_they_are_in_the_file_and_as_pairs_with_their_titles():
    assert [vars(passage) for passage in embedded.passages()] == PASSAGES
    for split in SPLITS:
        rows = [row for row in PASSAGES if row["split"] == split]
        pairs = [(pair.group, pair.first, pair.second) for pair in embedded.read("embed", "field-notes", split)]
        assert pairs == [(row["id"], row["title"], row["text"]) for row in rows]


def test_evidence_and_which_way_round_are_read_as_examples_of_their_tasks():
    rows = [(row["post"], label) for row in POSTS if row["split"] == "dev" for label in row["criteria"]]
    expected = [(post, CRITERIA[label["criterion"]], [label["evidence"] or ""]) for post, label in rows]
    questions = embedded.read("qa", "evidence", "dev")
    assert [(q.context, q.question, [a.text for a in q.answers] or [""]) for q in questions] == expected
    rows = [row for row in ITEMS if row["split"] == "dev"]
    sentences = embedded.read("ner", "which-way-round", "dev")
    entities = [(row["text"], [Entity(row["start"], row["end"], row["label"])]) for row in rows]
    assert [(sentence.text, entities_in(sentence.spans, sentence.tags)) for sentence in sentences] == entities
    labelled = [(one.text, one.label, one.group) for one in embedded.read("classify", "which-way-round", "dev")]
    assert labelled == [(row["text"], row["label"], row["group"]) for row in rows]


def test_an_unknown_split_or_task_and_a_damaged_file_are_refused(tmp_path, monkeypatch):
    for call in (lambda: embedded.passages("valid"), lambda: embedded.read("qa", "evidence", "valid")):
        with pytest.raises(DataError, match="is 'valid'; choose one of train, dev, test"):
            call()
    with pytest.raises(DataError, match="evidence has nothing for the task 'ner'"):
        embedded.read("ner", "evidence", "dev")
    monkeypatch.setattr(embedded, "folder", lambda name: tmp_path)
    path = tmp_path / "field_notes" / "passages.jsonl"
    path.parent.mkdir()
    path.write_text(f'{json.dumps(PASSAGES[0])}\n{{"id": "fn-0\n')
    with pytest.raises(DataError, match=re.escape(f"{path}, line 2: ")):
        embedded.passages("train")


# ---- Field Notes -----------------------------------------------------------------------------------------------------


def test_the_numbers_of_the_card_on_passages_are_those_of_the_file():
    numbers = []
    for row in PASSAGES:
        counts = {row["region"]: 1, row["genre"]: 1, "passages": 1, "words": len(row["text"].split())}
        numbers.append((row["split"], counts | {"bytes of text": len(row["text"].encode())}))
    assert table("field_notes", "Counts of the passages") == sums(numbers)


def test_every_question_is_on_its_passage_and_the_numbers_of_the_card_are_those_of_the_files():
    numbers, asked = [], Counter()
    for split in SPLITS:
        for question in embedded.read("qa", "field-notes", split):
            assert (question.context, split) == (TEXTS[question.group], SPLIT_OF[question.group]), question.id
            for answer in question.answers:
                assert question.context[answer.start :].startswith(answer.text) and answer.text == answer.text.strip()
                assert len(answer.text.split()) <= 12, question.id
            asked[question.group, question.question.casefold()] += 1
            several = len(question.answers) in (2, 3)
            counts = {"questions": 1, "without an answer": not question.answers}
            numbers.append((split, counts | {"with two or three spans to choose from": several}))
    assert Counter(group for group, _ in asked) == dict.fromkeys(TEXTS, 4) and max(asked.values()) == 1
    counted = table("field_notes", "Questions")
    del counted["lexical overlap, F1"]  # measured once, on these files
    assert counted == sums(numbers)


@pytest.mark.parametrize("split", SPLITS)
def test_the_columns_hold_every_word_of_every_passage_with_a_valid_tag(split):
    documents = (DATA / f"field_notes/entities.{split}.conll").read_text(encoding="utf-8").split("# document = ")[1:]
    assert [document.split("\n")[0] for document in documents] == [id for id, its in SPLIT_OF.items() if its == split]
    for document in documents:
        name, *lines = document.rstrip().split("\n")
        columns = [line.split("\t") for line in lines if line]
        assert [word for word, _ in columns] == [TEXTS[name][a:b] for a, b in words_of(TEXTS[name])], name
        for before, line in zip(["", *lines], lines, strict=False):
            tag, previous = line.partition("\t")[2], before.partition("\t")[2]
            assert not line or re.fullmatch(r"O|[BI]-(PER|ORG|LOC|DATE|MISC)", tag), (name, line)
            assert tag[:1] != "I" or previous[1:] == tag[1:], (name, line)


def test_the_numbers_of_the_card_on_entities_are_those_of_the_files():
    numbers = []
    for split in SPLITS:
        for sentence in embedded.read("ner", "field-notes", split):
            entities = entities_of(sentence.tags)
            counts = {"sentences": 1, "sentences without an entity": not entities, "entities": len(entities)}
            numbers.append((split, counts | {"words and signs": len(sentence.words)}))
            numbers += [(split, {kind: 1}) for _, _, kind in entities]
    assert table("field_notes", "Entities") == sums(numbers)


# ---- Evidence --------------------------------------------------------------------------------------------------------


def test_each_post_has_three_criteria_and_its_evidence_is_a_part_of_it():
    assert len({" ".join(row["post"].split()).casefold() for row in POSTS}) == len(POSTS)
    for row in POSTS:
        post, criteria = row["post"], [label["criterion"] for label in row["criteria"]]
        assert not [mark for mark in MARKS if mark in post], row["id"]
        assert len(set(criteria)) == 3 and set(criteria) <= set(CRITERIA), row["id"]
        given = [label["evidence"] for label in row["criteria"] if label["evidence"] is not None]
        assert len(set(given)) == len(given), row["id"]
        assert all(text == text.strip() and post.count(text) == 1 for text in given), row["id"]


def test_the_numbers_of_the_card_of_evidence_are_those_of_the_file():
    numbers = []
    for row in POSTS:
        given = [label["evidence"] is not None for label in row["criteria"]]
        counts = {"posts": 1, "words": len(row["post"].split()), "labels": 3, "labels with evidence": sum(given)}
        counts |= {"labels without": 3 - sum(given), "posts with evidence for all three": all(given)}
        numbers.append((row["split"], counts | {"posts with evidence for none": not any(given)}))
    assert table("evidence", "Counts") == sums(numbers)


# ---- Which way round -------------------------------------------------------------------------------------------------


def shared_side(row):
    return row["text"][: row["end"]] if row["direction"] == "after" else row["text"][row["start"] :]


def test_the_three_sentences_of_a_triple_share_the_name_and_its_other_side():
    groups, numbers = defaultdict(list), []
    for row in ITEMS:
        assert (row["start"], row["end"]) in words_of(row["text"]), row["id"]
        groups[row["group"]].append(row)
        numbers.append((row["split"], {"sentences": 1, "words": len(row["text"].split())}))
    for group, rows in groups.items():
        assert sorted(row["label"] for row in rows) == ["LOC", "ORG", "PER"], group
        assert len({(row["split"], row["direction"], shared_side(row)) for row in rows}) == 1, group
        numbers.append((rows[0]["split"], {f"triples, {rows[0]['direction']}": 1}))
    assert len({row["text"] for row in ITEMS}) == len(ITEMS)
    assert table("which_way_round", "Counts") == sums(numbers)


# ---- Known facts -----------------------------------------------------------------------------------------------------


def plain(text):
    """The words of a text in lower case, letters and digits only."""
    return " ".join("".join(c if c.isalnum() else " " for c in text.casefold()).split())


def test_no_question_contains_an_answer_of_its_fact_and_none_occurs_twice():
    for row in FACTS:
        assert len(row["paraphrases"]) == 5 and row["answers"], row["id"]
        for question in row["paraphrases"]:
            answers = filter(None, map(plain, row["answers"]))
            assert not [answer for answer in answers if re.search(rf"\b{answer}(e?s)?\b", plain(question))], question
    questions = [plain(question) for row in FACTS for question in row["paraphrases"]]
    assert len(set(questions)) == len(questions)
    assert len({(row["relation"], row["subject"].casefold()) for row in FACTS}) == len(FACTS)


def test_the_numbers_of_the_card_of_known_facts_are_those_of_the_file():
    numbers = []
    for row in FACTS:
        counts = {"facts": 1, "questions": len(row["paraphrases"]), "answers with aliases": len(row["answers"])}
        counts["words of the questions"] = len(" ".join(row["paraphrases"]).split())
        numbers.append((row["split"], counts))
    assert table("known_facts", "Counts", ("shots", "test")) == sums(numbers)
    shots = Counter(row["relation"] for row in FACTS if row["split"] == "shots")
    assert shots == dict.fromkeys({row["relation"] for row in FACTS}, 2)
