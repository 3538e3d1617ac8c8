"""Known facts: what the card promises of the shipped file, and the numbers of the card."""

import re
import unicodedata
from collections import Counter, defaultdict
from itertools import combinations

import pytest

from labkit.fusion.scores import exact_match
from tests.cards import DATA, counts, rows_of, table

FACTS = rows_of("known_facts/facts.jsonl")
CARD = (DATA / "known_facts" / "README.md").read_text(encoding="utf-8")
FACT_SPLITS = ("shots", "test")


def plain(text):
    """The words of a text in lower case, letters and digits only."""
    return " ".join("".join(c if c.isalnum() else " " for c in text.casefold()).split())


def framed(question, subject):
    """The plain question with X for its subject, in the singular or the plural."""
    question, subject = plain(question), plain(subject)
    for form in (subject + "es", subject + "s", subject):
        question = f" {question} ".replace(f" {form} ", " X ").strip()
    return question


def test_each_fact_has_the_form_of_the_card():
    for row in FACTS:
        assert list(row) == ["id", "split", "relation", "subject", "paraphrases", "answers"], row["id"]
        assert re.fullmatch(rf"{row['relation']}-\d\d", row["id"]) and len(row["paraphrases"]) == 5, row["id"]
        for question in row["paraphrases"]:
            assert re.fullmatch(r"[A-Z][ -~]*[!-~]\?", question) and question.count("?") == 1, question
            assert "  " not in question and 3 <= len(question.split()) <= 20, question
            assert "X" in framed(question, row["subject"]).split(), question
        for place, answer in enumerate(row["answers"]):
            assert answer == " ".join(answer.split()) and unicodedata.is_normalized("NFC", answer), answer
            assert 1 <= len(answer.split()) <= (5 if place else 3), answer
        assert len({answer.casefold() for answer in row["answers"]}) == len(row["answers"]) > 0, row["id"]


def test_relations_are_large_enough_and_two_facts_of_each_are_kept_for_prompts():
    relations = Counter(row["relation"] for row in FACTS)
    assert len(FACTS) >= 150 and len(relations) >= 12 and min(relations.values()) >= 10
    assert Counter(row["relation"] for row in FACTS if row["split"] == "shots") == dict.fromkeys(relations, 2)
    assert {row["split"] for row in FACTS} == set(FACT_SPLITS)
    for key in (("id",), ("relation", "subject")):
        assert len({tuple(row[name].casefold() for name in key) for row in FACTS}) == len(FACTS)


def test_no_question_contains_an_answer_of_its_fact_and_none_occurs_twice():
    for row in FACTS:
        for question in row["paraphrases"]:
            asked = f" {plain(question)} "
            answers = filter(None, map(plain, row["answers"]))
            assert not [answer for answer in answers if re.search(rf" {answer}(e?s)? ", asked)], question
    questions = [plain(question) for row in FACTS for question in row["paraphrases"]]
    assert len(set(questions)) == len(questions)


def test_a_number_is_accepted_in_digits_and_in_words_with_every_noun_that_a_wording_counts():
    for row in FACTS:
        if row["relation"] != "how-many":
            continue
        answers = {answer.casefold() for answer in row["answers"]}
        numbers = {answer for answer in answers if not any(answer.startswith(f"{other} ") for other in answers)}
        assert {number.isdecimal() for number in numbers} == {True, False}, row["id"]
        nouns = re.findall(r"\b(?:how many|number of) (\w+)", " ".join(row["paraphrases"]).casefold())
        assert {f"{number} {noun}" for number in numbers for noun in nouns} <= answers, row["id"]


def test_the_counts_of_the_card_are_those_of_the_file():
    counted, answers, most = defaultdict(Counter), defaultdict(list), defaultdict(Counter)
    for row in FACTS:
        counted["facts"][row["split"]] += 1
        counted["questions"][row["split"]] += len(row["paraphrases"])
        counted["words of the questions"][row["split"]] += len(" ".join(row["paraphrases"]).split())
        counted["answers with aliases"][row["split"]] += len(row["answers"])
        answers[row["relation"]].append(row["answers"][0])
        if row["split"] == "test":
            most[row["relation"]][row["answers"][0]] += 1
    assert table("known_facts", "Counts", FACT_SPLITS) == counts(counted, FACT_SPLITS)
    listed = re.findall(r"^\| ([\w-]+) \| [^|]*[a-z][^|]* \| (\d+) \| (\d+) \|$", CARD, re.M)
    assert {name: (int(n), int(different)) for name, n, different in listed} == {
        name: (len(usual), len(set(usual))) for name, usual in answers.items()
    }
    solved = sum(max(counts_of_answers.values()) for counts_of_answers in most.values()) / counted["facts"]["test"]
    assert f"is right on {solved:.3f} of test".replace("0.", ".") in CARD


def test_the_wordings_of_a_fact_and_the_frames_of_a_relation_differ_as_the_card_says():
    means, pairs, users = [], [], defaultdict(set)
    for row in FACTS:
        frames = [framed(question, row["subject"]) for question in row["paraphrases"]]
        words = [set(frame.split()) - {"X"} for frame in frames]
        overlaps = [len(a & b) / len(a | b) for a, b in combinations(words, 2)]
        means.append(sum(overlaps) / len(overlaps))
        pairs += overlaps
        for frame in frames:
            users[row["relation"], re.sub(r"\b(a|an|the) X", "X", frame)].add(row["id"])
    measured = [sum(means) / len(means), max(means), max(pairs), len(users), max(map(len, users.values()))]
    stated = table("known_facts", "How much the wordings differ", ("value",)).values()
    assert [round(number, 3) for number in measured] == [row["value"] for row in stated]
    assert max(means) <= 0.28 and max(pairs) <= 0.65 and measured[-1] <= 12 / 4


@pytest.mark.parametrize(
    ("fact", "given"),
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
def test_a_right_answer_counts_in_the_plural_with_its_adjective_or_as_a_code(fact, given):
    (accepted,) = [row["answers"] for row in FACTS if row["id"] == fact]
    missed = [text for text in given.split("; ") if not exact_match(text, accepted)]
    assert not missed
