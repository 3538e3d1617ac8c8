"""Known facts: what the card promises of the shipped file, and the numbers of the card."""

import re
from collections import Counter, defaultdict

from labkit.fusion.scores import exact_match
from tests.cards import DATA, counts, rows_of, table

FACTS = rows_of("known_facts/facts.jsonl")
CARD = (DATA / "known_facts" / "README.md").read_text(encoding="utf-8")
FACT_SPLITS = ("shots", "test")


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


def test_relations_are_large_enough_and_two_facts_of_each_are_kept_for_prompts():
    relations = Counter(row["relation"] for row in FACTS)
    assert len(FACTS) >= 150 and len(relations) >= 12 and min(relations.values()) >= 10
    assert Counter(row["relation"] for row in FACTS if row["split"] == "shots") == dict.fromkeys(relations, 2)
    assert {row["split"] for row in FACTS} == set(FACT_SPLITS)
    for key in (("id",), ("relation", "subject")):
        assert len({tuple(row[name].casefold() for name in key) for row in FACTS}) == len(FACTS)


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


RIGHT = {  # plurals, adjectives, codes, and numbers with a noun
    "currency-12": "British pounds; British pound sterling; pounds; GBP; £",
    "currency-10": "Polish zlotys; złotych; PLN",
    "currency-04": "CNY; Chinese yuan; renminbi (RMB); yuan renminbi",
    "how-many-01": "8 legs; Eight legs.; eight feet",
    "how-many-03": "12 payments; twelve months",
    "how-many-12": "26 keys; twenty-six letters; twenty six keys",
    "animal-class-12": "a marine mammal; mammals",
    "landmark-08": "Ancient Greece",
    "young-animal-06": "lion cubs; a lion cub",
    "capital-03": "Paris, France",
    "chemical-symbol-06": "the letter K",
}


def test_a_right_answer_counts_in_the_plural_with_its_adjective_or_as_a_code():
    accepted = {row["id"]: row["answers"] for row in FACTS}
    for fact, texts in RIGHT.items():
        assert not [text for text in texts.split("; ") if not exact_match(text, accepted[fact])], fact
