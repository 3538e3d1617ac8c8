"""Known facts: the shipped file, the figures of its card by other means, and each rule of the validator broken."""

import hashlib
import json
import re
from collections import Counter, defaultdict
from functools import partial
from itertools import combinations

import pytest

from labkit.datasets import known_facts
from labkit.datasets.catalogue import CATALOGUE, check
from labkit.fusion.scores import exact_match
from labkit.resources import folder

SHIPPED = folder("data") / "known_facts" / "facts.jsonl"
CARD = SHIPPED.with_name("README.md")


@pytest.fixture
def rows():
    return shipped_rows()


def shipped_rows():
    return [json.loads(line) for line in SHIPPED.read_text(encoding="utf-8").splitlines()]


@pytest.fixture
def write(write_lines):
    """write(rows) -> the path of a file that holds them."""
    return partial(write_lines, "facts.jsonl")


# ---- the shipped file and its card -----------------------------------------------------------------------------------


def test_the_shipped_file_keeps_every_rule_and_is_that_of_its_card():
    (data,) = [data for data in CATALOGUE if data.name == "known-facts"]
    assert check(data) == []
    assert f"\n{hashlib.sha256(SHIPPED.read_bytes()).hexdigest()}  facts.jsonl\n" in CARD.read_text(encoding="utf-8")


def test_there_are_at_least_150_facts_in_12_relations_and_two_of_each_are_kept_for_prompts(rows):
    assert len(rows) >= 150
    relations = Counter(row["relation"] for row in rows)
    assert len(relations) >= 12
    assert min(relations.values()) >= 10
    assert Counter(row["relation"] for row in rows if row["split"] == "shots") == dict.fromkeys(relations, 2)


def test_no_question_holds_an_answer_of_its_fact_and_none_stands_twice(rows):  # seen without the validator
    for row in rows:
        for question in row["paraphrases"]:
            asked = f" {plain(question)} "
            assert not [answer for answer in row["answers"] if f" {plain(answer)} " in asked], question
    questions = [plain(question) for row in rows for question in row["paraphrases"]]
    assert len(set(questions)) == len(questions) == 5 * len(rows)


def plain(text):
    return " ".join("".join(c if c.isalnum() else " " for c in text.casefold()).split())


def said(section):
    """{row: [cells]} of the tables in one section of the card."""
    text = CARD.read_text(encoding="utf-8").split(f"\n## {section}\n")[1].split("\n## ")[0]
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in re.findall(r"^\|.*\|$", text, re.M)]
    return {first: cells for first, *cells in lines[2:]}


def test_the_counts_of_the_card_are_those_of_the_file(rows):
    counted = defaultdict(list)
    for splits in (("shots",), ("test",), ("shots", "test")):
        here = [row for row in rows if row["split"] in splits]
        questions = [question for row in here for question in row["paraphrases"]]
        counted["facts"].append(len(here))
        counted["questions"].append(len(questions))
        counted["words of the questions"].append(len(" ".join(questions).split()))
        counted["answers with aliases"].append(sum(len(row["answers"]) for row in here))
    assert said("Counts") == {name: [f"{count:,}" for count in counts] for name, counts in counted.items()}
    answers = defaultdict(list)
    for row in rows:
        answers[row["relation"]].append(row["answers"][0])
    told = {name: [cells[1], cells[2]] for name, cells in said("Relations").items()}
    assert told == {name: [str(len(each)), str(len(set(each)))] for name, each in answers.items()}


def test_the_most_frequent_answer_of_a_relation_solves_what_the_card_says(rows):
    test = Counter((row["relation"], row["answers"][0]) for row in rows if row["split"] == "test")
    best = Counter()
    for (relation, _), count in test.items():
        best[relation] = max(best[relation], count)
    assert f"is right on {best.total() / test.total():.3f} of test".replace("0.", ".") in CARD.read_text("utf-8")


def test_the_measures_of_the_card_are_those_of_the_file(rows):
    """The overlap and the frames, by another implementation: plain string work on padded words."""
    means, pairs, users = [], [], defaultdict(set)
    for row in rows:
        framed = [without(plain(question), plain(row["subject"])) for question in row["paraphrases"]]
        words = [set(text.split()) - {"X"} for text in framed]
        here = [len(a & b) / len(a | b) for a, b in combinations(words, 2)]
        means.append(sum(here) / len(here))
        pairs += here
        for text in framed:
            users[row["relation"], re.sub(r"\b(a|an|the) X", "X", text)].add(row["id"])
    figures = [f"{sum(means) / len(means):.3f}", f"{max(means):.3f}", f"{max(pairs):.3f}"]
    figures += [str(len(users)), str(max(map(len, users.values())))]
    assert [cells[0] for cells in said("How much the wordings differ").values()] == [f.lstrip("0") for f in figures]


def without(text, subject):
    """The text with X for its subject, in the singular or the plural."""
    for form in (subject + "es", subject + "s", subject):
        text = f" {text} ".replace(f" {form} ", " X ").strip()
    return text


@pytest.mark.parametrize(
    ("fact", "said"),
    [
        ("currency-12", "British pounds; British pound sterling; pounds; GBP; £"),
        ("currency-05", "Russian rubles; the Russian rouble; RUB"),
        ("currency-10", "Polish zlotys; złotych; PLN"),
        ("currency-04", "CNY; Chinese yuan; renminbi (RMB); yuan renminbi"),
        ("how-many-01", "8 legs; Eight legs.; eight feet"),
        ("how-many-10", "8 arms; eight limbs; 8 limbs; eight feet"),
        ("how-many-05", "three lines; 3 lines; 3 sides"),
        ("how-many-03", "12 payments; twelve months"),
        ("how-many-12", "26 keys; twenty-six letters; twenty six keys"),
        ("animal-class-12", "a marine mammal; mammals"),
        ("animal-class-07", "flying mammal"),
        ("animal-class-10", "cartilaginous fishes"),
        ("animal-class-05", "Actinopterygii; ray-finned fishes"),
        ("landmark-08", "Ancient Greece"),
        ("landmark-12", "Ancient Egypt"),
        ("ingredient-06", "silicon dioxide"),
        ("ingredient-11", "wood fibres; timber"),
        ("opposite-11", "outside the house"),
        ("colour-08", "light yellow; pale yellow"),
        ("young-animal-06", "lion cubs; a lion cub"),
        ("capital-03", "Paris, France"),
        ("chemical-symbol-06", "the letter K"),
    ],
)
def test_a_right_answer_counts_in_the_plural_with_its_adjective_or_as_a_code(rows, fact, said):
    (accepted,) = [row["answers"] for row in rows if row["id"] == fact]
    missed = [text for text in said.split("; ") if not exact_match(text, accepted)]
    assert not missed


# ---- the measures ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "other", "shared"),
    [
        ("Who wrote Dracula?", "Who wrote Dracula?", 1.0),
        ("Who wrote Dracula?", "DRACULA: who penned it?", 1 / 4),  # who | wrote, penned, it
        ("Who wrote Dracula?", "Dracula is by whom?", 0.0),  # the subject does not count
        ("Dracula?", "Dracula!", 0.0),
    ],
)
def test_overlap_is_the_share_of_words_in_both_without_the_subject(one, other, shared):
    assert known_facts.overlap(one, other, "Dracula") == pytest.approx(shared)


def test_questions_on_two_subjects_have_one_frame_whatever_their_article_number_and_letter_case():
    frames = [
        known_facts.frame("What do you call a baby duck?", "duck"),
        known_facts.frame("What do you call a baby Horse?", "horse"),
    ]
    assert frames == ["what do you call a baby X?"] * 2
    assert known_facts.frame("What is an ant?", "ant") == known_facts.frame("What is the boss?", "boss") == "what is X?"
    assert known_facts.frame("What are ducks?", "duck") == known_facts.frame("What are sheep?", "sheep")
    assert known_facts.frame("What is important?", "ant") == "what is important?"


# ---- each rule, broken -----------------------------------------------------------------------------------------------


def line(number, **changes):
    """A change of some keys of one line."""
    return lambda rows: rows[number - 1].update(changes)


def asks(*questions):
    """Line 1, on the capital of Germany, asks these questions and then the rest of its own."""
    return lambda rows: rows[0].update(paraphrases=[*questions, *rows[0]["paraphrases"][len(questions) :]])


SPIDER = 108  # the index of how-many-01, on the legs of a spider


def answers_of_the_spider(*answers):
    return lambda rows: rows[SPIDER].update(answers=list(answers))


def asks_of_the_spider(number, question):
    return lambda rows: rows[SPIDER]["paraphrases"].__setitem__(number - 1, question)


def as_bytes(change):
    def altered(rows):
        rows[0] = change(json.dumps(rows[0]).encode())

    return altered


def swapped_frames(rows):
    """Four facts of a relation ask one of their questions in the same frame."""
    for row in rows[:4]:
        row["paraphrases"][4] = f"Whoever governs {row['subject']} lives in which town?"


def both_ask(question):
    """Line 1, on Germany, and line 3, on France, ask the same question."""

    def ask(rows):
        for row in (rows[0], rows[2]):
            row["paraphrases"][0] = question

    return ask


FIRST, THIRD = r"facts\.jsonl, line 1: ", r"facts\.jsonl, line 3: "
FAULTS = {  # what is broken -> what the validator says of it, and of nothing else
    "not JSON": (as_bytes(lambda b: b[:-9]), FIRST + "is not JSON"),
    "not UTF-8": (as_bytes(lambda b: b.replace(b"Berlin", b"K\xf6ln")), FIRST + "is not UTF-8"),
    "no object": (as_bytes(lambda b: b"[]"), FIRST + r"holds \[\]; expected an object"),
    "a key lost": (lambda r: r[2].pop("split"), THIRD + "has the keys id, relation, .*; expected id, split"),
    "a key more": (line(3, author="me"), THIRD + "has the keys .*, author; expected id"),
    "keys in another order": (lambda r: r.insert(2, dict(reversed(r.pop(2).items()))), THIRD + "has the keys answers,"),
    "a number": (line(3, subject=7), THIRD + "subject should be text, or a list of texts, and not empty"),
    "an answer without a list": (line(3, answers="Paris"), THIRD + "answers should be text, or a list of texts"),
    "a subject in a list": (line(3, subject=["Germany"]), THIRD + "subject should be text"),
    "no answer": (line(3, answers=[]), THIRD + "answers should be text, or a list of texts, and not empty"),
    "a blank answer": (line(3, answers=["Paris", " "]), THIRD + "answers should be text"),
    "id": (line(1, id="capital-1"), FIRST + "the id is 'capital-1'; expected capital-01 or the like"),
    "id of another relation": (line(1, id="sport-13"), FIRST + "the id is 'sport-13'; expected capital-01"),
    "id twice": (line(2, id="capital-01"), r"line 2: has the id 'capital-01' of line 1 again"),
    "subject twice": (
        lambda r: r[2].update(
            subject="GERMANY", paraphrases=[q.replace("France", "Germany") for q in r[2]["paraphrases"]]
        ),
        "line 3: has the subject 'GERMANY' of line 1 again",
    ),
    "split": (line(5, split="dev"), r"line 5: the split is 'dev'; expected shots, test"),
    "four paraphrases": (lambda r: r[0]["paraphrases"].pop(), FIRST + "has 4 different paraphrases; expected 5"),
    "six paraphrases": (
        lambda r: r[0]["paraphrases"].append("Where do laws for Germany come from?"),
        FIRST + "has 6 different paraphrases; expected 5",
    ),
    "a paraphrase twice": (
        lambda r: asks(r[0]["paraphrases"][1])(r),
        (
            FIRST + "has 4 different paraphrases; expected 5",
            FIRST + "has the question 'In which city .*' of line 1 again|share too many words: .* 1.00 in one pair",
        ),
    ),
    "a question of another fact": (
        both_ask("Do the French and the Germans love France or Germany more?"),
        "line 3: has the question 'Do the French .*' of line 1 again",
    ),
    "no question mark": (asks("Name the capital of Germany."), FIRST + "'Name .*' should be one question"),
    "two questions": (asks("Germany? What is its capital?"), FIRST + "'Germany.*' should be one question"),
    "a small letter first": (asks("what is the capital of Germany?"), FIRST + "'what .*' should be one question"),
    "a space at the end": (asks("What is the capital of Germany? "), FIRST + "'What .*' should be one question"),
    "a space before the mark": (asks("What is the capital of Germany ?"), FIRST + "'What .*' should be one question"),
    "two spaces": (asks("What is  the capital of Germany?"), FIRST + "'What .*' should be one question"),
    "a line break": (asks("What is\nthe capital of Germany?"), FIRST + "'What .*' should be one question"),
    "a typographic sign": (asks("What is Germany’s capital?"), FIRST + "'What .*' should be one question"),
    "a typographic sign before the mark": (
        asks("What is the capital of 'Germany’?"),
        FIRST + ".What .* should be one question",
    ),
    "two words": (asks("Germany's capital?"), FIRST + ".Germany.* has 2 words; expected 3 to 20"),
    "21 words": (
        asks("What " + "x " * 18 + "Germany did?"),
        FIRST + "'What .*' has 21 words; expected 3 to 20",
    ),
    "no subject": (asks("What is the capital of Bavaria?"), FIRST + "'What .*' does not name its subject, 'Germany'"),
    "the subject within a longer word": (asks("Who rules Germanyland now?"), FIRST + "'Who .*' does not name its sub"),
    "the answer": (
        asks("Is BERLIN or Bonn the capital of Germany?"),
        FIRST + "'Is BERLIN .*' holds its answer, 'Berlin'",
    ),
    "an alias": (
        lambda r: r[3]["paraphrases"].__setitem__(0, "What do tourists in Roma, Italy, see?"),
        "line 4: 'What do .*' holds its answer, 'Roma'",
    ),
    "the answer in the plural": (
        lambda r: (
            r[0].update(answers=["Berlin", "town"]) or asks("Of all towns in Germany, which one rules the rest?")(r)
        ),
        FIRST + "'Of all towns .*' holds its answer, 'town'",
    ),
    "four words": (line(1, answers=["the city of Berlin"]), FIRST + "the answer 'the city .*' has 4 words; expected 3"),
    "six words": (
        line(1, answers=["Berlin", "the old new town of Berlin"]),
        FIRST + "the answer 'the old .*' has 6 words; expected 5 at most",
    ),
    "an answer twice": (line(1, answers=["Berlin", "berlin"]), FIRST + "has an answer twice"),
    "a space in an answer": (line(1, answers=["Berlin "]), FIRST + "the answer 'Berlin ' has a space too many"),
    "an accent apart": (line(1, answers=["Köln".replace("ö", "o\u0308")]), FIRST + "the answer .* not in .* NFC"),
    "a counted noun not in digits": (
        answers_of_the_spider("eight", "8", "eight legs", "eight feet", "8 feet"),
        r"line 109: 'If a child .*' asks for legs, and '8 legs' is no answer",
    ),
    "a counted noun not in words": (
        answers_of_the_spider("Eight", "8", "eight legs", "8 legs", "8 feet"),
        r"line 109: 'A spider .*' asks for feet, and 'eight feet' is no answer",
    ),
    "a noun that one wording counts": (
        asks_of_the_spider(3, "What number of claws has the pest called spider?"),
        r"line 109: 'What number of claws .*' asks for claws, and 'eight claws' is no answer",
    ),
    "no number in digits": (
        answers_of_the_spider("eight", "eight legs", "eight feet"),
        r"line 109: the answers have no number in digits",
    ),
    "no number in words": (
        answers_of_the_spider("8", "8 legs", "8 feet"),
        r"line 109: the answers have no number in words",
    ),
    "one frame with a synonym": (
        asks(*(f"What is the {word} city of Germany, in short?" for word in ("main", "chief", "first", "top", "head"))),
        FIRST
        + r"its paraphrases share too many words: 0\.7\d on average, 0\.7\d in one pair; expected at most 0\.28 and",
    ),
    "two paraphrases alike": (
        asks("What is the capital city of Germany called?", "What is the capital town of Germany called?"),
        FIRST + r"its paraphrases share too many words: 0\.2\d on average, 0\.75 in one pair",
    ),
    "one frame in four facts": (
        swapped_frames,
        r"relation capital: 4 of 12 facts share the frame 'whoever governs X lives in which town\?'",
    ),
    "nine facts": (
        lambda r: r.__delitem__(slice(9, 12)),
        "relation capital: has 9 facts; expected at least 10",
    ),
    "three for prompts": (line(3, split="shots"), "relation capital: has 3 facts in the split shots; expected 2"),
    "one for prompts": (line(1, split="test"), "relation capital: has 1 facts in the split shots; expected 2"),
    "132 facts in 11 relations": (
        lambda r: r.__delitem__(slice(132, None)),
        ("whole file: holds 132 facts; expected at least 150", "whole file: holds 11 relations; expected at least 12"),
    ),
    "empty": (lambda r: r.clear(), r"facts\.jsonl is empty"),
}


@pytest.mark.parametrize("kind", FAULTS)
def test_a_fault_is_named_and_nothing_else(rows, write, kind):
    breaks, says = FAULTS[kind]
    breaks(rows)
    faults = known_facts.validate(write(rows))
    says = (says,) if isinstance(says, str) else says
    assert all(any(re.search(words, fault) for words in says) for fault in faults), faults
    assert all(any(re.search(words, fault) for fault in faults) for words in says), faults


def test_a_missing_file_is_a_fault_in_words(tmp_path):
    (fault,) = known_facts.validate(tmp_path / "none.jsonl")
    assert "none.jsonl could not be read" in fault


def test_faults_come_line_after_line_and_the_whole_last(rows, write):
    rows[7]["split"] = "dev"
    rows[2]["id"] = "x"
    rows[0]["split"] = "test"
    told = [re.search(r"line \d+|relation \w+", fault)[0] for fault in known_facts.validate(write(rows))]
    assert told == ["line 3", "line 8", "relation capital"]
