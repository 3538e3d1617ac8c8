"""Intervals of an old report, widened by its half-widths, are those that its runs would give."""

import json

import pytest

from labkit.bench import paired
from labkit.bench.effect_report import report
from scripts.widen_report import NEARLY, widen
from tests.made_up_studies import made_up

pytestmark = pytest.mark.end_to_end
NAME = "invented/classify:none"


@pytest.fixture
def old_and_exact(tmp_path, monkeypatch):
    """A report of twelve texts as it was made before intervals were widened, and as it is made now."""
    folder = made_up(tmp_path / "s", {"causal": 50.0, "bidirectional": 65.0, "repeated": 60.0}, n=12)
    exact = report([folder])
    with monkeypatch.context() as before:
        before.setattr(paired, "expansion", lambda groups, level: 1.0)
        old = report([folder])
    return json.loads(json.dumps(old)), json.loads(json.dumps(exact))


def gaps(made):
    (condition,) = made["conditions"]
    return [one["difference"] for one in (*condition["arms"], *condition["pairs"]) if one.get("difference")]


def test_the_widened_ends_are_those_that_the_runs_give(old_and_exact):
    old, exact = old_and_exact
    made = widen(old, {NAME})
    assert made["conditions"][0]["intervals"] == NEARLY
    assert len(gaps(exact)) >= 3
    for before, after, right in zip(gaps(old), gaps(made), gaps(exact), strict=True):
        width = right["high"] - right["low"]
        assert width > 1.02 * (before["high"] - before["low"])
        for end in ("low", "high"):
            assert after[end] == pytest.approx(right[end], abs=0.01 * width)


def test_a_condition_that_is_not_there_is_an_error_and_nothing_is_widened_twice(old_and_exact):
    old, _ = old_and_exact
    with pytest.raises(SystemExit, match="invented/classify:none"):
        widen(old, {"wikigold/ner:none"})
    with pytest.raises(SystemExit, match="already widened"):
        widen(widen(old, {NAME}), {NAME})
