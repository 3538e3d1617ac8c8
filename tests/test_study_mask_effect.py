"""benchmarks/study/mask_effect.py: the order of its stages, resuming, and comparisons that are fair."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.study import mask_effect, runner
from benchmarks.study.arms import arm, arms, named
from benchmarks.study.conditions import Condition, conditions
from benchmarks.study.mask_effect import Study, run_folder, run_study, tables
from labkit.datasets.embedded import read
from labkit.errors import DataError, ModelError, TrainingError
from labkit.models import load
from labkit.training import preset

pytestmark = pytest.mark.end_to_end

ARMS = ("causal", "bidirectional", "repeated", "right-to-left", "mntp:2", "unmask:below-1/2")
SETTINGS = preset("mini", per_device_train_batch_size=4, max_steps=2, patience=0)
STUDY = Study("tiny-gpt2", arms=ARMS, learning_rates=(1e-3, 3e-3), seeds=(0, 1), settings=SETTINGS, max_length=64)
SMALL = replace(STUDY, arms=("causal", "bidirectional"), learning_rates=(1e-3,), seeds=(0,))
NAME = "which-way-round/ner"


def diagnostic(n=12):
    sides = (read("ner", "which-way-round", side) for side in ("train", "dev", "test"))
    return Condition(NAME, "ner", {}, *([*side[: n // 2], *side[-n // 2 :]] for side in sides))


def quiet(text):
    pass


def metrics_of(folder, pattern="runs/*/*/*/*"):
    return {file.parent: json.loads(file.read_text()) for file in folder.glob(f"{pattern}/metrics.json")}


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    folder, log = tmp_path_factory.mktemp("study") / "all", []
    assert run_study(STUDY, [diagnostic()], folder, say=log.append) == {}
    return folder, log


def test_all_arms_of_a_seed_read_the_same_rows_start_with_the_same_head_and_have_their_mask(done):
    masks = {}
    for seed in STUDY.seeds:
        runs = metrics_of(done[0], f"runs/*/*/size-all/seed-{seed}")
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


def test_no_test_set_is_read_before_the_rates_are_frozen(done):
    folder, _ = done
    tuned = metrics_of(folder, "tuning/*/*/*")
    assert len(tuned) == len(ARMS) * 2
    assert all("test" not in metrics and metrics["n_test"] == 0 for metrics in tuned.values())
    assert not list(folder.glob("tuning/**/*.test.jsonl"))
    frozen = (folder / "frozen.json").stat().st_mtime_ns
    assert max((run / "metrics.json").stat().st_mtime_ns for run in tuned) <= frozen
    assert frozen <= min(file.stat().st_mtime_ns for file in folder.glob("runs/**/judged.test.jsonl"))
    for one, chosen in json.loads((folder / "frozen.json").read_text())[NAME].items():
        assert chosen["dev"][repr(chosen["learning_rate"])] == max(chosen["dev"].values()), one


def test_reported_runs_only_begin_with_frozen_rates(tmp_path, monkeypatch):
    real, frozen_at_test = mask_effect.finetune, []

    def watched(*arguments, **options):
        if options["test"]:
            frozen_at_test.append((tmp_path / "s" / "frozen.json").exists())
        return real(*arguments, **options)

    monkeypatch.setattr(mask_effect, "finetune", watched)
    run_study(replace(SMALL, learning_rates=(1e-3, 3e-3)), [diagnostic()], tmp_path / "s", say=quiet)
    assert frozen_at_test == [True, True]


def test_the_table_has_the_scores_of_the_runs_and_needs_only_the_folder(done, tmp_path):
    shutil.copytree(done[0], tmp_path / "moved")
    shutil.rmtree(tmp_path / "moved" / "adapted")
    rows = tables(tmp_path / "moved")
    assert rows.equals(tables(done[0])) and list(rows["arm"]) == list(ARMS)
    for row in rows.itertuples():
        runs = metrics_of(done[0] / run_folder(NAME, row.arm, None, 0).parent, "*")
        assert row.mean == pytest.approx(100 * sum(m["test"]["f1"] for m in runs.values()) / 2)
    assert tables(done[0], "repeated")["arm"][0] == "repeated"
    assert not [path for path in (done[0] / "runs").rglob("*") if path.name in ("model", "checkpoints")]


def test_a_study_that_is_killed_continues_and_ends_with_the_same_table(done, tmp_path, monkeypatch):
    real, calls = mask_effect.finetune, []

    def killed(*arguments, **options):
        calls.append(1)
        if len(calls) in (3, 9, 16):
            raise KeyboardInterrupt
        return real(*arguments, **options)

    monkeypatch.setattr(mask_effect, "finetune", killed)
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            run_study(STUDY, [diagnostic()], tmp_path / "s", say=quiet)
    run_study(STUDY, [diagnostic()], tmp_path / "s", say=quiet)
    assert len(calls) == 24 + 3 and tables(tmp_path / "s").equals(tables(done[0]))


def test_arms_and_seeds_can_be_added_and_what_was_frozen_stays(done, tmp_path):
    shutil.copytree(done[0], tmp_path / "s")
    before, log = json.loads((tmp_path / "s" / "frozen.json").read_text())[NAME], []
    more = replace(STUDY, arms=("causal", "unmask:above-1/2"), seeds=(0, 2))
    run_study(more, [diagnostic()], tmp_path / "s", say=log.append)
    assert [line for line in log if " runs, " in line] == ["4 runs, 2 of them done", "4 runs, 1 of them done"]
    after = json.loads((tmp_path / "s" / "frozen.json").read_text())[NAME]
    assert {name: after[name] for name in before} == before and "unmask:above-1/2" in after
    assert dict(tables(tmp_path / "s")[["arm", "n_seeds"]].values) == {
        "causal": 3, "unmask:above-1/2": 2, "bidirectional": 2, "repeated": 2, "right-to-left": 2, "mntp:2": 2,
        "unmask:below-1/2": 2,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("change", "n", "message"),
    [
        ({"model": "tiny-llama"}, 12, "model was 'tiny-gpt2', now 'tiny-llama'"),
        ({"settings": SETTINGS | {"max_steps": 3}}, 12, "settings was"),
        ({}, 9, f"conditions {NAME} was"),
    ],
)
def test_another_study_in_the_same_folder_is_refused(done, change, n, message):
    before = (done[0] / "study.json").read_bytes()
    with pytest.raises(TrainingError, match=message):
        run_study(replace(STUDY, **change), [diagnostic(n)], done[0], say=quiet)
    assert (done[0] / "study.json").read_bytes() == before


def test_invalid_studies_are_refused_before_anything_is_written(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(TrainingError, match="contains no study"):
        run_study(SMALL, [diagnostic()], tmp_path, say=quiet)
    with pytest.raises(ModelError, match="no model is called 'nope'"):
        run_study(replace(SMALL, model="nope"), [diagnostic()], tmp_path / "s", say=quiet)
    assert not (tmp_path / "s").exists()
    for change in ({"seeds": ()}, {"sizes": (4,)}, {"seeds": (1000,)}, {"method": "loar"}, {"arms": ("repeated",)}):
        with pytest.raises(DataError):
            replace(STUDY, **change)


@pytest.mark.parametrize("error", [TrainingError("it went wrong"), torch.OutOfMemoryError("CUDA out of memory")])
def test_a_run_that_fails_is_reported_and_the_others_go_on(tmp_path, monkeypatch, error):
    real = mask_effect.finetune

    def failing(*arguments, **options):
        if options["mask"] == "bidirectional":
            raise error
        return real(*arguments, **options)

    monkeypatch.setattr(mask_effect, "finetune", failing)
    failures = run_study(SMALL, [diagnostic()], tmp_path / "s", say=quiet)
    assert list(failures) == [f"{NAME}, bidirectional, rate 0.001, seed 0"] and str(error) in str(failures)
    assert list(tables(tmp_path / "s")["arm"]) == ["causal"]
    monkeypatch.undo()
    assert run_study(SMALL, [diagnostic()], tmp_path / "s", say=quiet) == {}


def test_a_rate_at_which_training_diverges_is_not_chosen_and_not_tried_again(tmp_path, monkeypatch):
    real, calls = mask_effect.finetune, []

    def diverging(*arguments, settings, **options):
        calls.append(settings["learning_rate"])
        if settings["learning_rate"] == 3e-3 and options["mask"] == "bidirectional":
            error = TrainingError("the loss is NaN")
            error.diverged = True
            raise error
        return real(*arguments, settings=settings, **options)

    monkeypatch.setattr(mask_effect, "finetune", diverging)
    study = replace(SMALL, learning_rates=(1e-3, 3e-3))
    for _ in range(2):
        assert run_study(study, [diagnostic()], tmp_path / "s", say=quiet) == {}
    assert len(calls) == 4 + 2
    chosen = json.loads((tmp_path / "s" / "frozen.json").read_text())[NAME]["bidirectional"]
    assert chosen["learning_rate"] == 1e-3 and chosen["dev"]["0.003"] is None


def test_a_run_that_another_process_is_at_comes_last(tmp_path, monkeypatch):
    runner.begun(tmp_path / "s", {}, ())
    held = runner.alone(run_folder(NAME, "causal", None, 0), tmp_path / "s")
    held.acquire()
    monkeypatch.setattr(runner.time, "sleep", lambda seconds: held.release())
    log = []
    assert run_study(SMALL, [diagnostic()], tmp_path / "s", say=log.append) == {}
    assert [line.split(", ")[1] for line in log if " of 2: " in line] == ["bidirectional", "causal"]


def test_texts_of_their_own_are_adapted_to_once_and_runs_that_wait_for_it_come_last(tmp_path, monkeypatch):
    (tmp_path / "wiki.txt").write_text("\n = Title = \n\n the first paragraph \n the second paragraph \n")
    runner.begun(tmp_path / "s", {}, ())
    held = runner.alone(Path("adapted/texts/mntp-2/seed-0"), tmp_path / "s")
    held.acquire()
    monkeypatch.setattr(runner.time, "sleep", lambda seconds: held.release())
    texts = (str(tmp_path / "wiki.txt"),)
    study = replace(SMALL, arms=("causal", "mntp:2"), seeds=(0, 1), adaptation_texts=texts)
    log = []
    assert run_study(study, [diagnostic()], tmp_path / "s", say=log.append) == {}
    assert [line.split(", ")[1] for line in log if " of 4: " in line] == ["causal", "causal", "mntp:2", "mntp:2"]
    (adapted,) = metrics_of(tmp_path / "s", "adapted/*/*/*").values()
    assert (adapted["seed"], adapted["n_train"]) == (0, 2)
    assert runner.read_study(tmp_path / "s")["adaptation_texts"][0] == "wiki.txt"
    (tmp_path / "wiki.txt").write_text("other texts\n")
    with pytest.raises(TrainingError, match="adaptation_texts was"):
        run_study(study, [diagnostic()], tmp_path / "s", say=quiet)


def test_arms_that_did_not_start_alike_are_not_compared(done, tmp_path):
    shutil.copytree(done[0], tmp_path / "s")
    file = tmp_path / "s" / run_folder(NAME, "repeated", None, 1) / "metrics.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"data_order": "another"}))
    with pytest.raises(TrainingError, match="seed 1: data_order differs"):
        tables(tmp_path / "s")


@pytest.mark.parametrize("method", ["lora", "frozen"])
def test_an_adapted_model_gets_the_same_head_whatever_dtype_the_model_is_stored_in(method, tmp_path):
    lm = load("tiny-gemma3")  # stored in bfloat16, adapted in float32
    lm.model.to(torch.bfloat16).save_pretrained(tmp_path / "small")
    lm.tokenizer.save_pretrained(tmp_path / "small")
    study = replace(SMALL, model=str(tmp_path / "small"), arms=("causal", "next:2"), method=method)
    assert run_study(study, [diagnostic()], tmp_path / "s", say=quiet) == {}
    assert len({metrics["head_start"] for metrics in metrics_of(tmp_path / "s").values()}) == 1


def test_a_smaller_training_set_is_part_of_a_larger_one(tmp_path):
    condition = diagnostic()
    small, large = ({each.id for each in condition.smaller(n)} for n in (4, 8))
    assert len(small) == 4 and small < large and condition.smaller(None) == condition.train
    run_study(replace(SMALL, sizes=(4, None)), [condition], tmp_path / "s", say=quiet)
    assert list(tables(tmp_path / "s")["n_train"]) == [4, 4, 12, 12]


def test_arms_and_conditions_are_named():
    assert named("causal,unmask:0,1,mntp") == ["causal", "unmask:0,1", "mntp"]
    assert [each.name for each in arms(["causal", "mntp", "repeated:2"])] == ["causal", "mntp:200", "repeated"]
    assert arm("next:7").mask == "causal" and arm("mlm:7").steps == 7 and arm("encoder:minilm-l6").model == "minilm-l6"
    for name in ("", "causal:1", "repeated:1", "mntp:0", "unmask:", "sideways"):
        with pytest.raises(DataError, match="there is no arm"):
            arm(name)
    found = conditions(["qa:field-notes", "notes=ner:field-notes"], max_train=6, max_eval=4)
    assert [each.name for each in found] == ["field-notes/question-first", "field-notes/question-last", "notes/ner"]
    assert all(len(each.train) == 6 and len(each.test) == 4 for each in found)
    for sources in (["ner:field-notes", "ner:field-notes"], ["ner:"], ["embed:field-notes"], ["a,b=ner:x,y"]):
        with pytest.raises(DataError):
            conditions(sources)
