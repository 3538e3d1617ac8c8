"""labkit.results: the tables against the JSON files that they are made from."""

import json

import pytest

from labkit import results, viz
from labkit.errors import DataError
from labkit.files import folder

STUDIES = ("mask_effect", "fusion_quality", "future_attention")
COLUMNS = ("label", "condition", "arm", "part", "n", "mean", "low", "high")
COLUMNS += ("difference", "difference_low", "difference_high")


def stored(name):
    return json.loads((folder("results") / f"{name}.json").read_text())


def test_parts_and_smaller_training_sets_are_rows_of_their_own():
    rows = results.load("mask_effect").query("condition == 'field-notes/ner' and model == 'gemma3-270m'")
    whole, few, of_part = (rows[rows.part == part] for part in ("all", "100 training examples", "DATE"))
    assert (few.n_train == 100).all() and (whole.n_train > 1000).all() and few.difference.isna().sum() == 1
    assert (of_part.n < whole.n.max()).all() and of_part.low.isna().all()


def test_the_mean_is_that_of_the_scores_of_the_seeds():
    for name in ("mask_effect", "future_attention"):
        for row in results.load(name).query("part == 'all'").itertuples():
            assert row.mean == pytest.approx(sum(row.scores) / len(row.scores)) and len(row.scores) == row.n_seeds


@pytest.mark.parametrize("name", STUDIES)
def test_all_studies_have_the_common_columns_and_can_be_drawn(name):
    rows = results.load(name)
    assert set(COLUMNS) <= set(rows)
    assert not rows.duplicated(["label", "part", "arm"]).any(), "a label, a part and an arm identify a row"
    groups = results.by_label(rows)
    assert sum(map(len, groups.values())) == rows.difference.notna().sum()
    assert viz.forest_figure(dict(list(groups.items())[:4]))
    unlearned = sum(arm.endswith("(unlearned)") for arms in groups.values() for arm in arms)
    assert unlearned == (~rows.learned & rows.difference.notna()).sum() if "learned" in rows else unlearned == 0
    pairs = results.pairs(name)
    assert set(pairs.label) <= set(rows.label)


def test_a_curve_has_one_row_for_each_seed_of_each_point():
    curve = stored("mask_effect")["curves"][1]
    rows = results.curves("mask_effect").query("title == @curve['title']")
    for line, points in curve["lines"].items():
        stored_points = [(x, scores) for x, scores in sorted(points)]
        assert [(x, list(group.score)) for x, group in rows[rows.line == line].groupby("x")] == stored_points


def test_the_scores_of_the_gpu_study_are_those_of_its_documents():
    documents = results.load("gpu/mask_effect_documents")
    for row in results.load("gpu/mask_effect").itertuples():
        runs = documents.query("condition == @row.condition and arm == @row.arm").groupby("seed")[["points", "out_of"]]
        scores = runs.sum().eval("100 * points / out_of")
        assert scores.round(2).to_list() == pytest.approx(row.scores, abs=0.011)


def test_a_file_of_rows_is_a_table_and_other_files_are_read_as_they_are():
    assert len(results.load("cost_cpu")) == len(stored("cost_cpu")["rows"])
    assert results.read("attention") == stored("attention")
    with pytest.raises(DataError, match="not a table"):
        results.load("attention")
    with pytest.raises(DataError, match="cost_cpu"):
        results.load("no_such_result")
