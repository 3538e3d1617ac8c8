"""The measured results that come with labkit."""

import pytest

from labkit.bench.stored import differences, effect_curves, effect_lines, mask_effects, names, stored
from labkit.errors import DataError
from labkit.resources import folder


def test_every_result_can_be_read_by_its_name():
    assert {path.stem for path in folder("results").glob("*.json")} == set(names()) and names()
    for name in names():
        assert isinstance(stored(name), dict)


def test_a_result_that_is_not_there_is_an_error_that_lists_the_others():
    with pytest.raises(DataError, match=f"there are {names()[0]}"):
        stored("no_such_result")


def test_stored_comparisons_have_an_interval_for_every_difference_and_name_their_seeds():
    for each in mask_effects():
        assert each["task"] in ("qa", "ner", "classify") and each["n_test"] > 0
        for one in each["arms"]:
            assert len(one["scores"]) == len(one["seeds"]) == one["n_seeds"]
            if "difference" in one and one["difference"]["n_seeds"] > 1:
                gap = one["difference"]
                assert gap["low"] < gap["high"]


def test_differences_are_named_by_condition_and_by_model_where_there_are_several():
    arms = [{"name": "causal"}, {"name": "bidirectional", "difference": {"mean": 1.0, "low": 0.5, "high": 1.5}}]
    one = {"name": "a/ner", "n_test": 1200, "model": "m", "arms": arms}
    assert differences([one]) == {"a/ner (n = 1,200)": {"bidirectional": (1.0, 0.5, 1.5)}}
    assert list(differences([one, one | {"model": "k"}])) == ["a/ner (n = 1,200), m", "a/ner (n = 1,200), k"]
    assert list(differences([one, one])) == ["a/ner (n = 1,200)", "a/ner (n = 1,200), study 2"]
    assert differences([one | {"arms": arms[:1]}]) == {}
    lost = [arms[0], arms[1] | {"learned": False}]
    assert differences([one | {"arms": lost}]) == {"a/ner (n = 1,200)": {"bidirectional (unlearned)": (1.0, 0.5, 1.5)}}
    begun = [arms[0] | {"learned": False}, arms[1]]
    assert list(differences([one | {"arms": begun}])) == ["a/ner (n = 1,200), causal unlearned"]


def test_the_halves_of_a_set_are_rows_of_their_own_and_other_parts_are_not():
    arms = [{"name": "causal"}, {"name": "bidirectional", "difference": {"mean": 1.0, "low": 0.5, "high": 1.5}}]
    of_part = {
        "causal": {"mean": 3.0},
        "bidirectional": {"mean": 5.0} | {"difference": {"mean": 2.0, "low": 1.0, "high": 3.0}},
    }
    parts = [{"name": name, "n": 600, "arms": of_part} for name in ("what follows decides", "PER")]
    one = {"name": "a/ner", "n_test": 1200, "model": "m", "arms": arms, "parts": parts}
    assert differences([one]) == {
        "a/ner (n = 1,200)": {"bidirectional": (1.0, 0.5, 1.5)},
        "a/ner (n = 1,200): where what follows decides (n = 600)": {"bidirectional": (2.0, 1.0, 3.0)},
    }


def test_a_comparison_is_told_in_lines_with_what_has_not_learned_marked():
    gap = {"mean": -3.0, "low": -5.0, "high": -1.0}
    each = {
        "name": "a/ner", "model": "m", "n_test": 1200, "baselines": {"outside": 10.0, "frequent": 20.0},
        "arms": [
            {"name": "causal", "mean": 50.0, "n_seeds": 5, "learned": True},
            {"name": "bidirectional", "mean": 19.5, "n_seeds": 1, "learned": False},
        ],
        "pairs": [{"one": "bidirectional", "other": "repeated", "difference": gap}],
    }  # fmt: skip
    assert effect_lines([each]) == [
        "a/ner, m, n = 1,200, best baseline 20.0",
        "    causal                 50.0   5 seeds",
        "    bidirectional          19.5   1 seed   not shown to be better than a baseline",
        "    bidirectional less repeated: -3.0 [-5.0, -1.0]",
    ]


def test_stored_curves_are_found_by_kind_and_can_be_drawn():
    from labkit.bench.effect_series import picture

    every = effect_curves()
    assert {each["kind"] for each in every} >= {"learning", "adaptation", "layers"}
    layers = effect_curves("layers")
    assert layers == [each for each in every if each["kind"] == "layers"]
    assert "share of the layers" in picture(layers[0]).alt
