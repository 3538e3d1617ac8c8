"""What a report tells across its conditions: both orders of a question, and a set that was learned for longer."""

import json

import pytest

from labkit.bench.effect_across import budgets, orders
from labkit.bench.effect_gaps import Told, longest
from labkit.bench.effect_names import HARMLESS, methods_apart, settings_apart
from labkit.bench.effect_report import report, written
from labkit.bench.effect_series import picture
from labkit.bench.effect_series_words import along
from labkit.bench.stored import differences, effect_lines
from tests.made_up_studies import made_up

pytestmark = pytest.mark.usefixtures("few_draws")

SHORT = {"causal": 60.0, "bidirectional": 20.0, "repeated": 62.0}
LONG = {"causal": 70.0, "bidirectional": 69.0}


@pytest.fixture(scope="module")
def studies(tmp_path_factory):
    folder = tmp_path_factory.mktemp("budgets")
    return [made_up(folder / f"s{steps}", of, max_steps=steps) for steps, of in ((200, SHORT), (1600, LONG))]


@pytest.fixture(scope="module")
def found(studies):
    return report(studies[::-1])


def asked(order: str, scores: dict[str, list[float]], **budget: object) -> dict:
    """A condition of a report, as far as the orders are made of it."""
    plan = {"epochs": 1, "max_steps": 9, "batch_size": 8, "gradient_accumulation": 1, "dtype": "float32"} | budget
    arms = [
        {"name": name, "seeds": list(range(len(each))), "scores": each, "mean": sum(each) / len(each)}
        for name, each in scores.items()
    ]
    name = {"name": f"invented/{order}", "task": "qa", "model": "none", "method": "lora"}
    name |= {"n_train": 10, "n_dev": 5, "n_test": 5}
    return {**name, "budget": plan, "arms": arms}


def test_both_orders_of_a_question_are_crossed_seed_by_seed():
    first = asked("question-first", {"causal": [50.0, 52.0, 51.0], "bidirectional": [40.0, 41.0, 42.0]})
    last = asked("question-last", {"causal": [20.0, 22.5, 20.5], "repeated": [50.0, 50.0, 50.0]})
    (found,) = orders([first, last])
    assert list(found["arms"]) == ["causal"]
    causal = found["arms"]["causal"]
    assert causal["first"] == 51.0 and causal["last"] == 21.0 and causal["difference"]["mean"] == -30.0
    half = 4.302653 * 0.5 / 3**0.5  # Student's t of two degrees of freedom; the gaps are -30, -29.5 and -30.5
    assert causal["difference"]["high"] - causal["difference"]["low"] == pytest.approx(2 * half, rel=1e-4)
    assert orders([first, asked("question-last", {"causal": [1.0]}, max_steps=8)]) == []  # another budget
    assert orders([first]) == []


@pytest.mark.end_to_end
def test_a_set_that_was_learned_for_longer_is_one_series_from_the_fewest_steps_to_the_most(found):
    (series,) = found["budgets"]
    assert list(series["arms"]) == ["causal", "bidirectional"]  # read twice for one number of steps: no series
    opened = series["arms"]["bidirectional"]
    assert [at["steps"] for at in opened["at"]] == [200, 1600]
    by_steps = {each["budget"]["max_steps"]: {one["name"]: one for one in each["arms"]} for each in found["conditions"]}
    assert [at["difference"] for at in opened["at"]] == [
        by_steps[n]["bidirectional"]["difference"] for n in (200, 1600)
    ]
    assert opened["rise"]["low"] < 49 < opened["rise"]["high"] and opened["rise"]["n_seeds"] == 5
    assert opened["growth"]["low"] < 39 < opened["growth"]["high"] and "growth" not in series["arms"]["causal"]
    (text,) = [text for text in found["words"] if text.startswith("**Over the steps of the task**")]
    assert (
        "after 200 steps" in text
        and "after 1,600 steps" in text
        and f"the difference moves by {opened['growth']['mean']:+.1f} [" in text
    )


@pytest.mark.end_to_end
def test_its_two_conditions_are_told_apart_by_their_steps_alone(found, tmp_path):
    names = ["invented/classify, at most 1,600 steps", "invented/classify, at most 200 steps"]
    assert all(name in " ".join(found["words"]) for name in names)
    labels = ["invented/classify (n = 400), at most 1,600 steps", "invented/classify (n = 400), at most 200 steps"]
    assert list(differences(found["conditions"])) == labels
    assert effect_lines(found["conditions"])[0] == "invented/classify, none, at most 1,600 steps, n = 400"
    page = written(found, tmp_path)[0].read_text()
    assert page.count("\n## invented/classify: none, full, at most 200 steps\n") == 1
    assert "| invented/classify, none, full, at most 1,600 steps | " in page
    titles = [curve["title"] for curve in found["curves"]]
    assert len(set(titles)) == len(titles) == 3 and titles[-1] == "invented/classify, none: how many steps of the task"
    assert "1600" in picture(found["curves"][-1]) and "bidirectional" in picture(found["curves"][-1]).alt


@pytest.mark.end_to_end
def test_in_short_the_longest_counts_of_an_arm_and_the_set_counts_once(found):
    opening = found["words"][0]
    assert "beat the causal one in none of 1 conditions, lost to it in none, made no clear difference in 1." in opening
    assert "read the input twice beat the causal one in none of 1, lost to it in none, made no clear" in opening
    assert "Of a set that was learned for shorter and for longer, the longest of each arm counts." in opening
    removed = next(text for text in found["words"] if text.startswith("**Removing the mask, and nothing else,**"))
    assert "harms in 1 of 2 (invented/classify, at most 200 steps" in removed
    claim = next(text for text in found["words"] if text.startswith("**The common claim"))
    assert "of 1 conditions with an interval" in claim


@pytest.mark.end_to_end
def test_a_report_made_of_one_folder_and_an_earlier_report_is_the_same(studies, found, tmp_path):
    earlier = tmp_path / "report.json"
    earlier.write_text(json.dumps(found))
    again = json.loads(json.dumps(report([earlier, studies[0]])))
    for part in ("budgets", "words"):
        assert again[part] == json.loads(json.dumps(found))[part]
    assert [curve["title"] for curve in again["curves"]] == [curve["title"] for curve in found["curves"]]
    assert json.loads(json.dumps(report([earlier])))["curves"] == json.loads(earlier.read_text())["curves"]


def test_what_differs_by_more_than_its_length_is_no_series(found):
    short, long = sorted(found["conditions"], key=lambda each: each["budget"]["max_steps"])
    assert len(budgets([short, long])) == 1
    assert budgets([short, long | {"n_train": 5}]) == []
    assert budgets([short, long | {"budget": long["budget"] | {"batch_size": 2}}]) == []
    assert budgets([short, long | {"settings": long["settings"] | {"window": "halve"}}]) == []
    assert budgets([short, long | {"method": "lora"}]) == budgets([short]) == []
    never = [each | {"arms": [one for one in each["arms"] if one["name"] != "causal"]} for each in (short, long)]
    assert budgets(never) == []


def test_series_of_one_set_by_two_methods_or_ranks_are_told_apart(found):
    short, long = sorted(found["conditions"], key=lambda each: each["budget"]["max_steps"])
    by_rank = {
        rank: [each | {"method": "lora", "settings": each["settings"] | {"rank": rank}} for each in (short, long)]
        for rank in (4, 8)
    }
    ranked = by_rank[4]
    series = budgets([short, *ranked, long, *by_rank[8]])
    assert len(series) == 3 and methods_apart(series) == [", full", ", lora, rank 4", ", lora, rank 8"]
    said = along([], [], series)[0]
    assert "causal on invented/classify, none, lora, rank 4: " in said
    full = short | {"settings": short["settings"] | {"rank": 8}}  # a rank that was not in use is none
    assert len(budgets([full, long])) == 1 and settings_apart([full, long])[0] == ", at most 200 steps"
    arms = [one | {"steps": 20} for one in short["arms"]]
    old = ranked[0] | {"settings": {}, "budget": short["budget"] | {"max_steps": 20}, "arms": arms}  # of unknown rank
    of_either = [by_rank[8][0], old, ranked[0]]
    assert budgets(of_either) == budgets(of_either[:2]) and len(budgets([ranked[0], old])) == 1
    assert settings_apart([old, *ranked]) == [", at most 20 steps", ", at most 200 steps", ", at most 1,600 steps"]
    gaps = [Told(each, {"mean": 1.0, "low": 0.0}, arm="bidirectional") for each in (old, by_rank[8][0], ranked[0])]
    assert longest(gaps) == gaps[1:]  # the old one is like either of two that are not alike


def test_orders_of_the_question_are_crossed_within_one_budget_and_rank():
    first = asked("question-first", {"causal": [50.0]})
    last = asked("question-last", {"causal": [20.0]})
    longer = [asked(order, {"causal": [60.0]}, max_steps=90) for order in ("question-first", "question-last")]
    crossed = orders([first, *longer, last | {"settings": {"rank": 4, HARMLESS: 3}}])
    assert [each["arms"]["causal"]["first"] for each in crossed] == [60.0, 50.0]
    assert methods_apart(crossed) == [", at most 90 steps", ", at most 9 steps"]
    assert "causal on invented, none, at most 9 steps: 50.0 with the question first" in along([], crossed, [])[0]
    assert orders([first | {"settings": {"rank": 8}}, last | {"settings": {"rank": 4}}]) == []
    assert orders([first | {"n_test": 4}, last]) == []


def test_of_several_that_were_asked_first_the_one_that_says_most_is_crossed():
    def asked_by(order, score, **settings):
        return asked(order, {"causal": [score]}) | {"settings": settings}

    firsts = [asked_by("question-first", 1.0), asked_by("question-first", 50.0, rank=8)]
    firsts += [asked_by("question-first", mean, rank=4, **{HARMLESS: n}) for mean, n in ((90.0, 7), (91.0, 9))]
    lasts = [asked_by("question-last", 20.0, rank=8), asked_by("question-last", 30.0, rank=4, **{HARMLESS: 9})]
    crossed = orders([*firsts, *lasts])
    assert [each["arms"]["causal"]["first"] for each in crossed] == [50.0, 91.0]
    assert methods_apart(crossed) == [", rank 8", ", rank 4"]


def test_how_often_dev_was_asked_is_named_where_nothing_else_tells_two_apart(found):
    short, long = sorted(found["conditions"], key=lambda each: each["budget"]["max_steps"])
    often = short | {"settings": short["settings"] | {HARMLESS: 7}}
    assert settings_apart([short, often, long]) == [
        f", at most 200 steps, evaluate every {short['settings'][HARMLESS]}",
        ", at most 200 steps, evaluate every 7",
        ", at most 1,600 steps",
    ]
    one, other = ({"name": "invented/classify", **each} for each in ({}, {"model": "none", "method": "full"}))
    assert settings_apart([one, other]) == ["", ""]  # older reports gave the name alone


def test_of_what_was_learned_as_long_twice_one_counts_and_other_arms_count_too(found):
    short, long = sorted(found["conditions"], key=lambda each: each["budget"]["max_steps"])
    often = short | {"settings": short["settings"] | {HARMLESS: 7}}
    gap = {"mean": 1.0, "low": 0.5}
    gaps = [Told(each, gap, arm=arm) for each in (short, often) for arm in ("mntp:50", "mlm:50")]
    more = Told(long, gap, arm="mlm:200")
    assert longest(gaps) == gaps[:2] and longest([*gaps, more]) == [gaps[0], more]
    assert longest([*gaps, Told(long, {"mean": 2.0, "low": None}, arm="mlm:200")]) == gaps[:2]


@pytest.mark.end_to_end
def test_what_is_unfinished_of_one_budget_stays_beside_that_of_another(studies, tmp_path):
    whole = report(studies[:1])
    note = {"name": "invented/classify", "model": "none", "method": "full", "done": 1, "planned": 2, "without": []}
    of_short = note | {key: whole["conditions"][0][key] for key in ("budget", "settings")}
    of_long = of_short | {"budget": of_short["budget"] | {"max_steps": 1600}}
    earlier = tmp_path / "report.json"
    earlier.write_text(json.dumps(whole | {"unfinished": [of_short, of_long, note]}))
    found = report([earlier, studies[0]])
    assert [each["budget"]["max_steps"] for each in found["unfinished"]] == [1600]  # measured here; so may be the third
    assert "(none, full), at most 1,600 steps, 1 of 2 runs" in found["words"][-1]
    half = report([earlier, earlier])
    assert len(half["unfinished"]) == 3
    assert (
        "at most 200 steps, 1 of 2 runs; " in half["words"][-1] and "at most 1,600 steps, 1 of 2" in half["words"][-1]
    )
