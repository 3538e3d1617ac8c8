"""benchmarks/study/mask_effect.py: the order of its stages, and comparisons that are fair."""

import json
import shutil
from dataclasses import replace

import pytest
import torch

from benchmarks.study import mask_effect, runner
from benchmarks.study.arms import arm, arms, named
from benchmarks.study.conditions import Condition, conditions
from benchmarks.study.mask_effect import Study, run_folder, run_study, tables
from labkit.datasets.embedded import SPLITS, read
from labkit.errors import DataError, ModelError, TrainingError
from labkit.models import load
from labkit.training import preset

pytestmark = pytest.mark.end_to_end

ARMS = ("causal", "bidirectional", "repeated", "right-to-left", "mntp:2", "unmask:below-1/2")
SETTINGS = preset("mini", per_device_train_batch_size=4, max_steps=2, patience=0)
STUDY = Study("tiny-gpt2", arms=ARMS, learning_rates=(1e-3,), seeds=(0, 1), settings=SETTINGS, max_length=64)
SMALL = replace(STUDY, arms=("causal", "bidirectional"), seeds=(0,))
NAME = "which-way-round/ner"


def diagnostic(n=12):
    sides = (read("ner", "which-way-round", split) for split in SPLITS)
    return Condition(NAME, "ner", {}, *([*side[: n // 2], *side[-n // 2 :]] for side in sides))


def metrics_of(folder, pattern="runs/*/*/*/*"):
    return {file.parent: json.loads(file.read_text()) for file in folder.glob(f"{pattern}/metrics.json")}


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    folder = tmp_path_factory.mktemp("study") / "all"
    assert run_study(STUDY, [diagnostic()], folder) == {}
    return folder


@pytest.fixture
def copy(done, tmp_path):
    return shutil.copytree(done, tmp_path / "copy")


def test_all_arms_of_a_seed_read_the_same_rows_start_with_the_same_head_and_have_their_mask(done):
    masks = {}
    for seed in STUDY.seeds:
        runs = metrics_of(done, f"runs/*/*/size-all/seed-{seed}")
        assert len(runs) == len(ARMS)
        for key in ("data_order", "head_start"):
            assert len({metrics[key] for metrics in runs.values()}) == 1, key
        for run, metrics in runs.items():
            mask = metrics["mask"]
            masks[run.parents[1].name] = mask["measured"], mask["readings"], tuple(mask.get("opened", ()))
    assert masks == {
        "causal": ("causal", 1, ()), "bidirectional": ("bidirectional", 1, (0, 1)), "repeated": ("causal", 2, ()),
        "right-to-left": ("right-to-left", 1, ()), "mntp-2": ("bidirectional", 1, (0, 1)),
        "unmask-below-1--2": ("mixed", 1, (0,)),
    }  # fmt: skip


def test_the_table_has_the_scores_of_the_runs_and_needs_only_their_folder(copy):
    shutil.rmtree(copy / "adapted")
    rows = tables(copy)
    assert list(rows["arm"]) == list(ARMS)
    for row in rows.itertuples():
        runs = metrics_of(copy / run_folder(NAME, row.arm, None, 0).parent, "*")
        assert row.mean == pytest.approx(100 * sum(metrics["test"]["f1"] for metrics in runs.values()) / 2)
    assert tables(copy, "repeated")["arm"][0] == "repeated"
    assert not [path for path in (copy / "runs").rglob("*") if path.name in ("model", "checkpoints")]


def test_arms_and_seeds_can_be_added_and_what_was_frozen_stays(copy):
    before = json.loads((copy / "frozen.json").read_text())[NAME]
    assert run_study(replace(STUDY, arms=("causal", "unmask:above-1/2"), seeds=(0, 2)), [diagnostic()], copy) == {}
    after = json.loads((copy / "frozen.json").read_text())[NAME]
    assert {name: after[name] for name in before} == before and set(after) - set(before) == {"unmask:above-1/2"}
    expected = dict.fromkeys(ARMS, 2) | {"causal": 3, "unmask:above-1/2": 2}
    assert dict(tables(copy)[["arm", "n_seeds"]].values) == expected


def test_invalid_studies_are_refused_before_anything_is_written(copy, tmp_path):
    with pytest.raises(TrainingError, match=f"conditions {NAME} was"):
        run_study(STUDY, [diagnostic(9)], copy)
    with pytest.raises(ModelError, match="no model is called 'nope'"):
        run_study(replace(SMALL, model="nope"), [diagnostic()], tmp_path / "s")
    assert not (tmp_path / "s").exists()
    for change in ({"seeds": ()}, {"sizes": (4,)}, {"seeds": (1000,)}, {"arms": ("repeated",)}):
        with pytest.raises(DataError):
            replace(STUDY, **change)


def test_the_best_rates_on_dev_are_frozen_before_a_test_set_is_read_and_none_that_diverges(tmp_path, monkeypatch):
    finetune, rates, folder = mask_effect.finetune, [], tmp_path / "s"

    def diverging(*arguments, settings, **options):
        rates.append(settings["learning_rate"])
        assert bool(options["test"]) == (folder / "frozen.json").exists()
        if settings["learning_rate"] == 3e-3 and options["mask"] == "bidirectional":
            error = TrainingError("the loss is NaN")
            error.diverged = True
            raise error
        return finetune(*arguments, settings=settings, **options)

    monkeypatch.setattr(mask_effect, "finetune", diverging)
    study = replace(SMALL, learning_rates=(1e-3, 3e-3))
    assert run_study(study, [diagnostic()], folder) == {} and len(rates) == 4 + 2
    assert run_study(study, [diagnostic()], folder) == {} and len(rates) == 4 + 2  # what diverged is not tried again
    frozen = json.loads((folder / "frozen.json").read_text())[NAME]
    assert frozen["bidirectional"]["learning_rate"] == 1e-3 and frozen["bidirectional"]["dev"]["0.003"] is None
    scores = frozen["causal"]["dev"]
    assert len(scores) == 2 and scores[repr(frozen["causal"]["learning_rate"])] == max(scores.values())
    tuned = metrics_of(folder, "tuning/*/*/*").values()
    assert [metrics["n_test"] for metrics in tuned if "diverged" not in metrics] == [0, 0, 0]
    assert not list(folder.glob("tuning/**/*.test.jsonl"))


def test_texts_of_their_own_are_adapted_to_once(tmp_path):
    texts = tmp_path / "wiki.txt"
    texts.write_text("\n = Title = \n\n the first paragraph \n the second paragraph \n")
    study = replace(SMALL, arms=("causal", "mntp:2"), seeds=(0, 1), adaptation_texts=(str(texts),))
    assert run_study(study, [diagnostic()], tmp_path / "s") == {}
    (adapted,) = metrics_of(tmp_path / "s", "adapted/*/*/*").values()
    assert (adapted["seed"], adapted["n_train"]) == (0, 2)
    assert runner.read_study(tmp_path / "s")["adaptation_texts"][0] == "wiki.txt"
    texts.write_text("other texts\n")
    with pytest.raises(TrainingError, match="adaptation_texts was"):
        run_study(study, [diagnostic()], tmp_path / "s")


def test_arms_that_did_not_start_alike_are_not_compared(copy):
    file = copy / run_folder(NAME, "repeated", None, 1) / "metrics.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"data_order": "another"}))
    with pytest.raises(TrainingError, match="seed 1: data_order differs"):
        tables(copy)


def test_an_adapted_model_gets_the_same_head_whatever_dtype_the_model_is_stored_in(tmp_path):
    lm = load("tiny-gemma3")  # stored in bfloat16, adapted in float32
    lm.model.to(torch.bfloat16).save_pretrained(tmp_path / "small")
    lm.tokenizer.save_pretrained(tmp_path / "small")
    study = replace(SMALL, model=str(tmp_path / "small"), arms=("causal", "next:2"), method="lora")
    assert run_study(study, [diagnostic()], tmp_path / "s") == {}
    assert len({metrics["head_start"] for metrics in metrics_of(tmp_path / "s").values()}) == 1


def test_a_smaller_training_set_is_part_of_a_larger_one(tmp_path):
    condition = diagnostic()
    small, large = ({example.id for example in condition.smaller(n)} for n in (4, 8))
    assert len(small) == 4 and small < large and condition.smaller(None) == condition.train
    run_study(replace(SMALL, sizes=(4, None)), [condition], tmp_path / "s")
    assert list(tables(tmp_path / "s")["n_train"]) == [4, 4, 12, 12]


def test_arms_and_conditions_are_named():
    assert named("causal,unmask:0,1,mntp") == ["causal", "unmask:0,1", "mntp"]
    assert [one.name for one in arms(["causal", "mntp", "repeated:2"])] == ["causal", "mntp:200", "repeated"]
    assert arm("next:7").mask == "causal" and arm("mlm:7").steps == 7 and arm("encoder:minilm-l6").model == "minilm-l6"
    for name in ("", "causal:1", "repeated:1", "mntp:0", "unmask:", "sideways"):
        with pytest.raises(DataError, match="there is no arm"):
            arm(name)
    made = conditions(["qa:field-notes", "notes=ner:field-notes"], max_train=6, max_eval=4)
    assert [one.name for one in made] == ["field-notes/question-first", "field-notes/question-last", "notes/ner"]
    assert all(len(one.train) == 6 and len(one.test) == 4 for one in made)
    for sources in (["ner:field-notes", "ner:field-notes"], ["ner:"], ["embed:field-notes"], ["a,b=ner:x,y"]):
        with pytest.raises(DataError):
            conditions(sources)
