"""Field Notes: what its card promises of passages, questions and entities, and the reader."""

import re
import shutil
from collections import Counter, defaultdict

import pytest

from labkit.datasets import embedded
from labkit.datasets.examples import entities_of, words_of
from labkit.errors import DataError
from tests.cards import DATA, SPLITS, counts, rows_of, table

PASSAGES = rows_of("field_notes/passages.jsonl")
TEXTS = {row["id"]: row["text"] for row in PASSAGES}
SPLIT_OF = {row["id"]: row["split"] for row in PASSAGES}


def test_the_numbers_of_the_card_on_passages_are_those_of_the_file():
    counted, runs = defaultdict(Counter), defaultdict(set)
    for row in PASSAGES:
        words = re.findall(r"[^\W_]+(?:'[^\W_]+)*", row["text"].lower())
        for start in range(len(words) - 7):
            runs[tuple(words[start : start + 8])].add(row["id"])
        for name in (row["region"], row["genre"], "passages"):
            counted[name][row["split"]] += 1
        counted["words"][row["split"]] += len(row["text"].split())
        counted["bytes of text"][row["split"]] += len(row["text"].encode())
    assert table("field_notes", "Counts of the passages") == counts(counted)
    assert not [ids for ids in runs.values() if len(ids) > 1], "no passage repeats eight words of another"


# ---- questions -----------------------------------------------------------------------------------------------------


def overlap_f1(question):
    """F1, in percent, of answering with the sentence that shares the most different words with the question."""

    def normal(text):  # as SQuAD's script compares: lower case, without punctuation and articles
        return [word for word in re.sub(r"[^\w\s]", "", text.lower()).split() if word not in ("a", "an", "the")]

    asked, sentences = set(normal(question.question)), re.split(r"(?<=[.!?])\s+|\n+", question.context)
    best = max(map(normal, sentences), key=lambda words: len(asked & set(words)))
    answers = [normal(answer.text) for answer in question.answers]
    f1 = [2 * sum((Counter(best) & Counter(words)).values()) / (len(best) + len(words)) for words in answers]
    return 100 * max(f1, default=0.0)


def test_every_question_is_on_its_passage_and_the_numbers_of_the_card_are_those_of_the_files():
    counted, overlap, asked = defaultdict(Counter), {}, Counter()
    for split in SPLITS:
        questions = embedded.read("qa", "field-notes", split)
        overlap[split] = round(sum(map(overlap_f1, questions)) / len(questions), 1)
        for question in questions:
            assert (question.context, split) == (TEXTS[question.group], SPLIT_OF[question.group]), question.id
            assert question.id.startswith(f"{question.group}-")
            assert re.fullmatch(r"\S.*\?", question.question), question.id
            for answer in question.answers:
                assert question.context[answer.start :].startswith(answer.text) and answer.text == answer.text.strip()
                assert len(answer.text.split()) <= 12, question.id
            asked[question.group, question.question.casefold()] += 1
            counted["questions"][split] += 1
            counted["without an answer"][split] += not question.answers
            counted["with two or three spans to choose from"][split] += len(question.answers) in (2, 3)
    assert Counter(group for group, _ in asked) == dict.fromkeys(TEXTS, 4) and max(asked.values()) == 1
    assert table("field_notes", "Questions") == counts(counted) | {"lexical overlap, F1": overlap}
    assert 0.15 < counted["without an answer"].total() / counted["questions"].total() < 0.25
    assert max(overlap.values()) < 40, "the words of a question must not give its answer away"


# ---- entities ------------------------------------------------------------------------------------------------------


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
    counted, names = defaultdict(Counter), defaultdict(set)
    for split in SPLITS:
        for sentence in embedded.read("ner", "field-notes", split):
            entities = entities_of(sentence.tags)
            counted["sentences"][split] += 1
            counted["sentences without an entity"][split] += not entities
            counted["words and signs"][split] += len(sentence.words)
            counted["entities"][split] += len(entities)
            for start, end, kind in entities:
                counted[kind][split] += 1
                names[split] |= {" ".join(sentence.words[start:end])} if kind != "DATE" else set()
    assert table("field_notes", "Entities") == counts(counted)
    dev, test = (f"{len(names[split] & names['train'])} of {len(names[split])} in {split}" for split in SPLITS[1:])
    assert f"{dev} and {test} are labelled in train" in (DATA / "field_notes/README.md").read_text(encoding="utf-8")


# ---- the reader ----------------------------------------------------------------------------------------------------


def test_passages_are_read_as_they_stand_in_the_file_and_as_pairs_with_their_titles():
    assert [vars(passage) for passage in embedded.passages()] == PASSAGES
    for split in SPLITS:
        rows = [row for row in PASSAGES if row["split"] == split]
        assert [vars(passage) for passage in embedded.passages(split)] == rows
        pairs = [(pair.group, pair.first, pair.second) for pair in embedded.read("embed", "field-notes", split)]
        assert pairs == [(row["id"], row["title"], row["text"]) for row in rows]


def test_an_unknown_split_or_task_and_a_damaged_file_are_refused(tmp_path, monkeypatch):
    for call in (lambda: embedded.passages("valid"), lambda: embedded.read("qa", "evidence", "valid")):
        with pytest.raises(DataError, match="is 'valid'; choose one of train, dev, test"):
            call()
    with pytest.raises(DataError, match="evidence has nothing for the task 'ner'"):
        embedded.read("ner", "evidence", "dev")
    shutil.copytree(DATA / "field_notes", tmp_path / "field_notes")
    monkeypatch.setattr(embedded, "folder", lambda name: tmp_path)
    path = tmp_path / "field_notes" / "passages.jsonl"
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([*lines[:11], b'{"id": "fn-0', *lines[12:]]))
    with pytest.raises(DataError, match=re.escape(f"{path}, line 12: ")):
        embedded.passages("train")
