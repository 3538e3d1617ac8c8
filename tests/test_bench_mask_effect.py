"""The runner of `labkit bench mask-effect`: order of its stages, resuming, and a report from the folders alone."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file as read_safetensors

from labkit.bench import mask_effect
from labkit.bench.arms import arm, arms
from labkit.bench.conditions import Condition, conditions
from labkit.bench.effect_report import report, written
from labkit.bench.mask_effect import Study, run_study
from labkit.bench.paired import counted
from labkit.cli_bench import whole_numbers
from labkit.datasets.embedded import read
from labkit.datasets.examples import Sentence
from labkit.errors import DataError, DivergedError, LabkitError, ModelError, TrainingError
from labkit.tasks.plans import Plan
from labkit.tasks.recipes import RECIPES, by_name
from tests.made_up_studies import made_up

pytestmark = [pytest.mark.end_to_end, pytest.mark.usefixtures("few_draws")]

ARMS = ("causal", "bidirectional", "repeated", "right-to-left", "mntp:2", "unmask:below-1/2")
PLAN = Plan(batch_size=4, gradient_accumulation=1, max_steps=2, patience=0)
STUDY = Study("tiny-gpt2", arms=ARMS, learning_rates=(1e-3, 3e-3), seeds=(0, 1), plan=PLAN, max_length=64)


def diagnostic(n=12):
    """The first and the last triples: of one half of the set, and of the other."""
    whole = (read("ner", "which-way-round", side) for side in ("train", "dev", "test"))
    sides = (side[: n // 2] + side[-n // 2 :] for side in whole)
    return Condition("which-way-round/ner", "ner", "ner:which-way-round", {}, *sides)


def quiet(text):
    pass


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    folder = tmp_path_factory.mktemp("study") / "all"
    said = []
    assert run_study(STUDY, [diagnostic()], folder, say=said.append) == {}
    return folder, said


def without_time(found):
    """The report but for what the clock said."""
    text = json.dumps(found, default=str)
    found = json.loads(text)
    for each in found["conditions"]:
        for one in each["arms"]:
            del one["seconds"], one["seconds_before"]
    return found


def test_all_arms_of_a_seed_see_the_same_rows_in_the_same_order_and_the_mask_they_are_named_for(done):
    folder, _ = done
    orders, masks, heads, opened = {}, {}, {}, {}
    for file in folder.glob("runs/*/*/*/*/metrics.json"):
        metrics, run = json.loads(file.read_text()), file.parent
        orders.setdefault(run.name, set()).add(metrics["data_order"])
        masks.setdefault(run.parents[1].name, set()).add((metrics["mask"]["measured"], metrics["mask"]["readings"]))
        assert metrics["packing"] is True
        heads.setdefault(run.name, set()).add(metrics["head_start"])
        opened.setdefault(run.parents[1].name, set()).add(tuple(metrics["mask"].get("opened", ())))
    assert {name: len(each) for name, each in heads.items()} == {"seed-0": 1, "seed-1": 1}
    assert heads["seed-0"] != heads["seed-1"]
    assert opened["unmask-below-1--2"] == {(0,)} and opened["causal"] == {()} and opened["bidirectional"] == {(0, 1)}
    assert {name: len(each) for name, each in orders.items()} == {"seed-0": 1, "seed-1": 1}
    assert orders["seed-0"] != orders["seed-1"]
    assert masks == {
        "causal": {("causal", 1)}, "bidirectional": {("bidirectional", 1)}, "repeated": {("causal", 2)},
        "right-to-left": {("right-to-left", 1)}, "mntp-2": {("bidirectional", 1)},
        "unmask-below-1--2": {("mixed", 1)},
    }  # fmt: skip


def test_the_test_set_is_read_after_the_rates_are_frozen_and_never_in_the_tuning(done):
    folder, _ = done
    tuned = list(folder.glob("tuning/*/*/*/metrics.json"))
    assert len(tuned) == len(ARMS) * 2
    for file in tuned:
        metrics = json.loads(file.read_text())
        assert "test" not in metrics and metrics["n_test"] == 0
        assert not list(file.parent.glob("*.test.jsonl"))
    frozen = (folder / "frozen.json").stat().st_mtime_ns
    assert max(f.stat().st_mtime_ns for f in tuned) <= frozen
    assert min(f.stat().st_mtime_ns for f in folder.glob("runs/*/*/*/*/judged.test.jsonl")) >= frozen
    chosen = json.loads((folder / "frozen.json").read_text())["which-way-round/ner"]
    for name, each in chosen.items():
        assert each["dev"][f"{each['learning_rate']:g}"] == max(each["dev"].values()), name


def test_what_needs_no_model_is_judged_text_by_text_and_adds_up_to_its_scores(done):
    folder, _ = done
    lines = json.loads((folder / "baselines" / "which-way-round--ner" / "size-all.json").read_text())
    metrics = json.loads(next(folder.glob("runs/*/causal/size-all/seed-0/metrics.json")).read_text())
    for name, score in metrics["baselines"]["test"].items():
        assert counted({0: lines[name]}, "ner").scores[0] == pytest.approx(score)
    assert all("over_baseline" in one for one in report([folder])["conditions"][0]["arms"])


@pytest.mark.parametrize(
    ("task", "scale"), [("ner:field-notes", 1), ("qa:field-notes", 100), ("classify:which-way-round", 1)]
)
def test_baselines_judged_text_by_text_have_their_scores(task, scale):
    (found,) = conditions([task], orders=["question-first"], max_eval=60)
    recipe = by_name(found.task)
    scores = recipe.baselines(found.train, found.test)
    lines = recipe.baseline_lines(found.train, found.test)
    assert list(lines) == list(scores) and max(scores.values()) > 0
    for name, some in lines.items():
        assert scale * counted({0: some}, found.task).scores[0] == pytest.approx(scores[name])


def test_a_baseline_that_cannot_be_made_is_said_and_the_runs_go_on(tmp_path, monkeypatch):
    def none(*_):
        raise DataError("the 4 training texts are of fewer than two classes")

    monkeypatch.setitem(RECIPES, "ner", replace(RECIPES["ner"], baseline_lines=none))
    said = []
    study = replace(STUDY, arms=("causal",), learning_rates=(1e-3,), seeds=(0,))
    assert run_study(study, [diagnostic()], tmp_path / "s", say=said.append) == {}
    assert any(text.endswith("(the 4 training texts are of fewer than two classes)") for text in said)
    (one,) = report([tmp_path / "s"])["conditions"][0]["arms"]
    assert "over_baseline" not in one


def test_an_adaptation_that_an_earlier_version_made_is_taken_as_it_is(tmp_path):
    study = replace(STUDY, arms=("causal", "mntp:2"), learning_rates=(1e-3,), seeds=(0,))
    run_study(study, [diagnostic()], tmp_path / "s", say=quiet)
    (file,) = (tmp_path / "s").glob("adapted/*/*/*/config.json")
    assert '"dtype": "auto"' in file.read_text()
    file.write_text(file.read_text().replace('"dtype": "auto"', '"dtype": "float32"'))
    shutil.rmtree(next((tmp_path / "s").glob("runs/*/mntp-2/*/seed-0")))
    assert run_study(study, [diagnostic()], tmp_path / "s", resume=True, say=quiet) == {}


def test_an_adapted_model_that_was_not_kept_is_made_again(tmp_path):
    """Of a study that `scripts/keep_study.py` has packed; to it a size is added."""
    study = replace(STUDY, arms=("causal", "mntp:2"), learning_rates=(1e-3,), seeds=(0,))
    run_study(study, [diagnostic()], tmp_path / "s", say=quiet)
    (folder,) = (tmp_path / "s").glob("adapted/*/*/*")
    weights = (folder / "model" / "model.safetensors").read_bytes()
    shutil.rmtree(folder / "model")
    assert run_study(replace(study, sizes=(6, None)), [diagnostic()], tmp_path / "s", resume=True, say=quiet) == {}
    assert (folder / "model" / "model.safetensors").read_bytes() == weights


@pytest.fixture(scope="module")
def in_sixteen_bits(tmp_path_factory):
    """A tiny model that is stored in bfloat16, which is trained in float32 on a CPU."""
    import labkit

    folder, lm = tmp_path_factory.mktemp("hub") / "small", labkit.load("tiny-gemma3")
    lm.model.to(torch.bfloat16).save_pretrained(folder)
    lm.tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("method", ["lora", "frozen"])
def test_an_adapted_model_gets_the_head_of_the_others_whatever_it_is_stored_in(in_sixteen_bits, method, tmp_path):
    study = replace(
        STUDY, model=in_sixteen_bits, arms=("causal", "next:2"), learning_rates=(1e-3,), seeds=(0,), method=method
    )
    assert run_study(study, [diagnostic()], tmp_path / "s", say=quiet) == {}
    stored = read_safetensors(next((tmp_path / "s").glob("adapted/**/model.safetensors")))
    assert {each.dtype for each in stored.values()} == {torch.float32}  # or this would show nothing
    found = [json.loads(file.read_text()) for file in (tmp_path / "s").glob("runs/*/*/*/*/metrics.json")]
    assert len({each["head_start"] for each in found}) == 1 and len(found) == 2
    assert [one["name"] for one in report([tmp_path / "s"])["conditions"][0]["arms"]] == ["causal", "next:2"]


@pytest.mark.parametrize("written", ["its place in the study", "the whole path"])
def test_a_study_that_was_moved_goes_on_with_a_run_of_an_adapted_model(written, tmp_path):
    study = replace(STUDY, arms=("causal", "mntp:2"), learning_rates=(1e-3,), seeds=(0,))
    run_study(study, [diagnostic()], tmp_path / "s", say=quiet)
    (run,) = (tmp_path / "s").glob("runs/*/mntp-2/*/seed-0")
    (run / "metrics.json").unlink()
    config = json.loads((run / "config.json").read_text())
    assert config["model"] == "adapted/ner--which-way-round/mntp-2/seed-0/model"
    if written == "the whole path":  # by an earlier version
        (run / "config.json").write_text(json.dumps(config | {"model": str(tmp_path / "s" / config["model"])}))
    (tmp_path / "s").rename(tmp_path / "elsewhere")
    assert run_study(study, [diagnostic()], tmp_path / "elsewhere", resume=True, say=quiet) == {}
    assert (tmp_path / "elsewhere" / run.relative_to(tmp_path / "s") / "metrics.json").exists()


def test_no_model_and_no_checkpoint_is_left_of_a_run(done):
    folder, _ = done
    assert not [path for path in (folder / "runs").rglob("*") if path.name in ("model", "checkpoints")]
    assert (folder / "adapted").is_dir()


def test_what_is_done_and_what_is_left_is_said(done):
    _, said = done
    assert said[0] == "24 runs, 0 of them done"
    assert said[1].startswith("1 of 24: which-way-round/ner, causal, rate 0.001: dev f1 ")
    assert said[-1].startswith("24 of 24: which-way-round/ner, unmask:below-1/2, seed 1: test f1 ")
    assert said[-1].endswith("about 0 min left)")


def test_the_report_is_rebuilt_from_the_folder_alone_wherever_it_lies(done, tmp_path):
    folder, _ = done
    live = report([folder])
    shutil.copytree(folder, tmp_path / "moved")
    for model in (tmp_path / "moved" / "adapted").glob("*/*/*/model"):
        shutil.rmtree(model)
    assert report([tmp_path / "moved"]) == live
    files = written(live, tmp_path / "moved")
    assert json.loads(files[1].read_text()) == json.loads(json.dumps(live))
    table = files[0].read_text()
    for one in live["conditions"][0]["arms"]:
        dev = ", ".join(
            f"**{score:.1f}**" if float(rate) == one["rate"] else f"{score:.1f}"
            for rate, score in one["dev_by_rate"].items()
        )
        assert f"| {one['name']} | 2 | {dev} | {one['mean']:.1f} [" in table
    assert all(file.exists() for file in files)


def test_the_scores_of_the_report_are_those_of_the_runs(done):
    folder, _ = done
    for one in report([folder])["conditions"][0]["arms"]:
        where = folder / "runs" / "which-way-round--ner" / mask_effect.folders.slug(one["name"]) / "size-all"
        scores = [json.loads((where / f"seed-{s}" / "metrics.json").read_text())["test"]["f1"] for s in (0, 1)]
        assert one["scores"] == pytest.approx([100 * score for score in scores])


def test_a_causal_model_is_never_over_the_ceiling_of_the_diagnostic(done):
    found = report([done[0]])["conditions"][0]["diagnostic"]
    assert found["causal"]["after"]["triples_over"] == 0
    assert found["causal"]["after"]["of"] == 3 * found["causal"]["after"]["ceiling"]


def test_a_study_killed_in_the_middle_ends_with_the_same_table(done, tmp_path, monkeypatch):
    real, calls = mask_effect.finetune, []

    def killed(*arguments, **options):
        calls.append(1)
        if len(calls) in (3, 9):
            raise KeyboardInterrupt
        return real(*arguments, **options)

    monkeypatch.setattr(mask_effect, "finetune", killed)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            run_study(STUDY, [diagnostic()], tmp_path / "s", resume=True, say=quiet)
    run_study(STUDY, [diagnostic()], tmp_path / "s", resume=True, say=quiet)
    assert len(calls) == 24 + 2
    assert without_time(report([tmp_path / "s"])) == without_time(report([done[0]]))


def test_runs_side_by_side_give_the_same_table(done, tmp_path):
    said = []
    assert run_study(STUDY, [diagnostic()], tmp_path / "s", jobs=2, say=said.append) == {}
    assert without_time(report([tmp_path / "s"])) == without_time(report([done[0]]))
    assert sorted(int(each.partition(" of ")[0]) for each in said[1:]) == list(range(1, 25))
    assert not list((tmp_path / "s").rglob("checkpoints"))


def test_arms_and_seeds_can_be_added_and_what_was_frozen_stays(done, tmp_path):
    shutil.copytree(done[0], tmp_path / "s")
    before = json.loads((tmp_path / "s" / "frozen.json").read_text())["which-way-round/ner"]
    said = []
    more = replace(STUDY, arms=("causal", "unmask:above-1/2"), seeds=(0, 2))
    run_study(more, [diagnostic()], tmp_path / "s", resume=True, say=said.append)
    assert said[0] == "6 runs, 1 of them done"  # 2 rates of the new arm; of 4 reported runs one is there
    after = json.loads((tmp_path / "s" / "frozen.json").read_text())["which-way-round/ner"]
    assert {name: after[name] for name in before} == before and "unmask:above-1/2" in after
    names = {one["name"]: one["seeds"] for one in report([tmp_path / "s"])["conditions"][0]["arms"]}
    assert names["causal"] == [0, 1, 2] and names["unmask:above-1/2"] == [0, 2] and names["repeated"] == [0, 1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "tiny-llama"}, "model was 'tiny-gpt2', now 'tiny-llama'"),
        ({"learning_rates": (1e-3,)}, "learning_rates was"),
        ({"plan": replace(PLAN, max_steps=3)}, "plan was"),
    ],
)
def test_another_study_in_the_same_folder_is_refused(done, change, message):
    with pytest.raises(TrainingError, match=message):
        run_study(replace(STUDY, **change), [diagnostic()], done[0], resume=True, say=quiet)


def test_a_study_of_a_version_that_knew_fewer_choices_goes_on(done, tmp_path):
    shutil.copytree(done[0], tmp_path / "s")
    file = tmp_path / "s" / "study.json"
    older = json.loads(file.read_text())
    del older["study"]["plan"]["batch_tokens"], older["study"]["window"]
    file.write_text(json.dumps(older))
    said = []
    run_study(STUDY, [diagnostic()], tmp_path / "s", resume=True, say=said.append)
    assert said == ["12 runs, 12 of them done"]  # what was tuned is frozen
    assert json.loads(file.read_text())["study"]["window"] == "keep"


def test_other_examples_of_the_same_name_are_refused(done):
    with pytest.raises(TrainingError, match="examples of which-way-round/ner are not those"):
        run_study(STUDY, [diagnostic(9)], done[0], resume=True, say=quiet)


def test_a_folder_in_use_or_begun_needs_resume_or_another_name(done, tmp_path):
    with pytest.raises(TrainingError, match="holds a study already"):
        run_study(STUDY, [diagnostic()], done[0], say=quiet)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(TrainingError, match="not empty and holds no study"):
        run_study(STUDY, [diagnostic()], tmp_path, say=quiet)
    from filelock import FileLock

    with FileLock(done[0] / ".lock"), pytest.raises(TrainingError, match="another process is at work"):
        run_study(STUDY, [diagnostic()], done[0], resume=True, say=quiet)


def test_a_model_that_is_not_there_is_an_error_before_anything_is_written(tmp_path):
    with pytest.raises(ModelError, match="no model is called 'nope'"):
        run_study(replace(STUDY, model="nope"), [diagnostic()], tmp_path / "s", say=quiet)
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (TrainingError("it went wrong"), "it went wrong"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to\nallocate"), "the memory is full (CUDA out of memory."),
    ],
)
def test_a_run_that_fails_is_noted_and_the_others_go_on(tmp_path, monkeypatch, error, told):
    real = mask_effect.finetune

    def failing(*arguments, **options):
        if options["mask"] == "bidirectional":
            raise error
        return real(*arguments, **options)

    monkeypatch.setattr(mask_effect, "finetune", failing)
    study = replace(STUDY, arms=("bidirectional", "causal"), learning_rates=(1e-3,), seeds=(0,))
    failures = run_study(study, [diagnostic()], tmp_path / "s", say=quiet)
    assert list(failures) == ["runs/which-way-round--ner/bidirectional/size-all/seed-0"]
    assert next(iter(failures.values())).startswith(told)
    assert json.loads((tmp_path / "s" / "failures.json").read_text()) == failures
    assert [one["name"] for one in report([tmp_path / "s"])["conditions"][0]["arms"]] == ["causal"]


def test_layers_that_the_model_does_not_have_are_an_error_before_anything_is_written(tmp_path):
    study = replace(STUDY, arms=("causal", "unmask:7"))
    with pytest.raises(LabkitError, match="has layers 0 to 1"):
        run_study(study, [diagnostic()], tmp_path / "s", say=quiet)
    assert not (tmp_path / "s").exists()


def test_rows_that_are_too_long_to_be_read_twice_are_an_error_before_anything_is_written(tmp_path):
    (found,) = conditions(["qa:field-notes"], orders=["question-first"], max_train=8, max_eval=4)
    long = replace(found.dev[0], context=found.dev[0].context * 4)
    found = replace(found, dev=[*found.dev[1:], long])
    study = replace(STUDY, arms=("causal", "repeated:3"), max_length=None)
    with pytest.raises(DataError, match=r"repeated:3: the longest row of .* give --max-length 342, which is") as it:
        run_study(study, [found], tmp_path / "s", say=quiet)
    assert "384 tokens, which makes 1,150 in 3 readings, and tiny-gpt2 has 1,024 positions" in str(it.value)
    (found,) = conditions(["ner:which-way-round"], max_train=6, max_eval=4)
    words = ["tide"] * 1500
    long = Sentence.of_words("long", words, ["O"] * len(words))
    study = replace(STUDY, arms=("causal", "bidirectional"), max_length=2000)
    with pytest.raises(DataError, match=r"^the longest row of .* has 2,000 tokens, and tiny-gpt2 has 1,024 positions"):
        run_study(study, [replace(found, dev=[long])], tmp_path / "s", say=quiet)
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    ("changes", "complaint"), [({"method": "loar"}, "method is 'loar'"), ({"rank": 0}, "rank is 0")]
)
def test_a_mistyped_study_is_refused_before_it_has_a_folder(changes, complaint):
    with pytest.raises(DataError, match=complaint):
        replace(STUDY, **changes)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"plan": replace(PLAN, dtype="bf16")}, "bf16"),
        ({"plan": replace(PLAN, dtype="float16")}, "float16 needs a GPU"),
        ({"plan": replace(PLAN, epochs=0.0)}, "epochs are 0"),
        ({"arms": ("causal", "encoder:minilm-l66")}, "no model is called 'minilm-l66'"),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU float16 can be asked for")
def test_what_no_run_could_be_is_an_error_before_anything_is_written(changes, complaint, tmp_path):
    with pytest.raises(LabkitError, match=complaint):
        run_study(replace(STUDY, **changes), [diagnostic()], tmp_path / "s", say=quiet)
    assert not (tmp_path / "s").exists()


def test_what_is_no_training_is_said_and_the_parent_keeps_no_model_on_a_gpu(tmp_path, monkeypatch):
    import labkit

    said, asked, real = [], [], labkit.load
    monkeypatch.setattr(labkit, "load", lambda *names, **options: asked.append(options) or real(*names, **options))
    study = replace(STUDY, arms=("causal",), learning_rates=(1e-3,), seeds=(0,), sizes=(4, 5000, None))
    run_study(study, [diagnostic()], tmp_path / "s", say=said.append)
    assert "which-way-round/ner has 12 training examples: no run with 5000" in said
    assert asked[0]["device"] == "cpu"


def test_a_rate_that_fails_is_written_down_with_what_was_chosen(tmp_path, monkeypatch):
    real = mask_effect.finetune

    def diverging(*arguments, plan, **options):
        if plan.learning_rate == 3e-3 and options["mask"] == "bidirectional":
            raise DivergedError("the loss is no number any more")
        return real(*arguments, plan=plan, **options)

    monkeypatch.setattr(mask_effect, "finetune", diverging)
    study = replace(STUDY, arms=("causal", "bidirectional"), seeds=(0,))
    run_study(study, [diagnostic()], tmp_path / "s", say=quiet)
    run_study(study, [diagnostic()], tmp_path / "s", resume=True, say=quiet)  # when failures.json is gone
    found = report([tmp_path / "s"])
    arms_ = {one["name"]: one for one in found["conditions"][0]["arms"]}
    assert arms_["causal"]["failed_rates"] == {} and list(arms_["causal"]["dev_by_rate"]) == ["0.001", "0.003"]
    assert arms_["bidirectional"]["failed_rates"] == {0.003: "the loss is no number any more"}
    assert list(arms_["bidirectional"]["dev_by_rate"]) == ["0.001"]
    assert (
        "**A smaller grid than the others:** bidirectional on which-way-round/ner, rate 0.003 (the loss is no number "
        "any more)." in found["words"]
    )
    assert ", - | " in written(found, tmp_path / "out")[0].read_text()


def test_two_tasks_on_data_of_one_name_are_adapted_each_on_its_own_texts(tmp_path):
    both = conditions(["qa:field-notes", "ner:field-notes"], max_train=6, max_eval=4)
    assert {each.name for each in both} == {
        "field-notes/question-first", "field-notes/question-last", "field-notes/ner"
    }  # fmt: skip
    study = replace(STUDY, arms=("causal", "mntp:2"), learning_rates=(1e-3,), seeds=(0,), max_length=128)
    assert run_study(study, both, tmp_path / "s", say=quiet) == {}
    adapted = {path.name for path in (tmp_path / "s" / "adapted").iterdir()}
    assert adapted == {"qa--field-notes", "ner--field-notes"}
    found = report([tmp_path / "s"])
    assert all(one["arms"][1]["seconds_before"] > 0 and len(one["arms"]) == 2 for one in found["conditions"])


def test_smaller_training_sets_lie_in_larger_ones_and_make_a_curve(tmp_path):
    condition = diagnostic()
    small, large = ({each.id for each in condition.smaller(n)} for n in (4, 8))
    assert len(small) == 4 and small < large and condition.smaller(None) == condition.train
    study = replace(STUDY, arms=("causal", "bidirectional"), learning_rates=(1e-3,), sizes=(4, None))
    run_study(study, [condition], tmp_path / "s", say=quiet)
    (curve,) = [each for each in report([tmp_path / "s"])["curves"] if each["kind"] == "size"]
    assert {name: [x for x, _ in points] for name, points in curve["lines"].items()} == {
        "causal": [4, 12], "bidirectional": [4, 12]
    }  # fmt: skip


# -- a report of runs that were made up: what is planted must be found, and nothing else -------------------------------


def test_a_gain_that_needs_many_examples_is_told_as_growing_and_one_that_does_not_is_not(tmp_path):
    few = {5: {"causal": 50.0, "repeated": 50.0, "bidirectional": 60.0}}
    made_up(tmp_path / "s", {"causal": 60.0, "repeated": 80.0, "bidirectional": 70.0}, smaller=few, n=1500)
    found = report([tmp_path / "s"])
    (condition,) = found["conditions"]
    small, full = condition["sizes"]
    assert (small["size"], full["size"]) == (5, 10)
    assert small["arms"]["repeated"]["growth"]["mean"] == pytest.approx(
        full["arms"]["repeated"]["difference"]["mean"] - small["arms"]["repeated"]["difference"]["mean"]
    )
    assert small["arms"]["repeated"]["growth"]["low"] > 10
    steady = small["arms"]["bidirectional"]["growth"]
    assert steady["low"] < 0 < steady["high"]
    assert "growth" not in full["arms"]["repeated"] and "difference" not in full["arms"]["causal"]
    for name in ("repeated", "bidirectional"):  # the same numbers wherever the report tells them
        alone = next(one["difference"] for one in condition["arms"] if one["name"] == name)
        there = full["arms"][name]["difference"]
        assert [there[key] for key in ("mean", "low", "high")] == [alone[key] for key in ("mean", "low", "high")]
    text = next(each for each in found["words"] if "number of training examples" in each)
    assert "repeated on invented/classify" in text
    assert "on the 5 seeds of both, with 10 rather than 5 examples the difference moves by +" in text
    page = written(found, tmp_path / "report")[0].read_text()
    assert "| training examples | 5 (5 steps, 5 seeds) | 10 (5 steps, 5 seeds) |" in page
    assert "![invented/classify, none: how many training examples](" in page


def test_an_adaptation_that_replaces_examples_is_seen_where_there_are_few(tmp_path):
    few = {5: {"causal": 60.0, "bidirectional": 40.0, "mntp:20": 60.0}}
    made_up(tmp_path / "s", {"causal": 70.0, "bidirectional": 70.0, "mntp:20": 70.0}, smaller=few, n=1500)
    found = report([tmp_path / "s"])
    (condition,) = found["conditions"]
    (small, full) = condition["sizes"]
    gaps = [next(p["difference"] for p in each["pairs"] if p["one"] == "mntp:20") for each in (small, condition)]
    assert "pairs" not in full
    assert gaps[0]["low"] > 10 and gaps[1]["low"] < 0 < gaps[1]["high"]
    told = next(each for each in found["words"] if "number of training examples" in each)
    assert "mntp:20 less bidirectional on invented/classify: +" in told and "with 5" in told
    assert "an adaptation reads the texts of all" in told
    (few,) = [text for text in found["words"] if text.startswith("**With few examples, in short.**")]
    assert (
        "On invented/classify, at the rates of the full set, the difference of the unmasked one is, with 5 examples, -"
        in few
    )
    assert "; mntp:20 less bidirectional, with 5, +" in few
    # 2 to causal and 1 pair with all, as many with 5, and 2 that tell by how much the one is larger than the other
    assert "Of 8 differences that are told here" in " ".join(found["words"])
    page = written(found, tmp_path / "report")[0].read_text()
    assert "Pairs with 5: mntp:20 less bidirectional: +" in page and "Pairs with 10" not in page


def test_a_planted_gain_is_reported_as_one_and_a_planted_null_is_not(tmp_path):
    chances = {"causal": 60.0, "bidirectional": 72.0, "repeated": 60.0, "mntp:10": 45.0, "next:10": 60.0}
    found = report([made_up(tmp_path / "s", chances)])
    gaps = {one["name"]: one.get("difference") for one in found["conditions"][0]["arms"]}
    assert gaps["bidirectional"]["low"] > 5 and gaps["bidirectional"]["high"] < 19
    assert gaps["repeated"]["low"] < 0 < gaps["repeated"]["high"]
    assert gaps["mntp:10"]["high"] < -8
    told = "\n".join(found["words"])
    opening = found["words"][0]
    assert "mask was removed, and nothing else done, beat the causal one in 1 of 1 conditions (by 1" in opening
    assert "read the input twice beat the causal one in none of 1, lost to it in none, made no clear" in opening
    assert "the unmasked one was better in 1 of 1 (by " in opening and "was worse for it in 1 (by " in found["words"][1]
    assert "learned" not in opening
    assert "**Removing the mask, and nothing else,** helps in 1 of 1 (invented/classify +1" in told
    assert "It shows no clear difference in 1 of 1 (invented/classify" in told
    assert "**After 10 steps of MNTP** the unmasked model harms in 1 of 1" in told
    assert "as many steps of next-token prediction it is worse in 1 of 1" in told
    assert "borne out in 1" in told


def test_one_arm_alone_has_a_table_and_no_figure_of_differences(tmp_path):
    found = report([made_up(tmp_path / "s", {"causal": 60.0})])
    files = written(found, tmp_path / "out", "mine")
    assert [file.name for file in files] == ["mine.md", "mine.json", "mine-curve-1.svg"]
    assert "was not measured" in files[0].read_text()


def test_a_run_scored_once_on_dev_has_no_learning_curve_now_or_in_an_earlier_report(tmp_path):
    folder = made_up(tmp_path / "s", {"causal": 60.0, "bidirectional": 60.0})
    twice = report([folder])
    assert [curve["kind"] for curve in twice["curves"]] == ["learning"]
    for file in folder.glob("runs/*/*/*/*/trainer_state.json"):
        file.write_text(json.dumps({"log_history": [{"step": 5, "accuracy": 0.6}]}))
    assert report([folder])["curves"] == []
    (curve,) = twice["curves"]
    point = curve | {"lines": {name: points[-1:] for name, points in curve["lines"].items()}}
    earlier = tmp_path / "earlier.json"
    for drawn, kept in (([curve], [curve]), ([point], [])):
        earlier.write_text(json.dumps(twice | {"curves": drawn}))
        assert report([earlier])["curves"] == json.loads(json.dumps(kept))


def test_what_no_arm_has_learned_is_said_and_rules_no_claim_out(tmp_path):
    folder = made_up(tmp_path / "s", {"causal": 40.0, "bidirectional": 40.0})
    for file in folder.glob("runs/*/*/*/*/metrics.json"):
        file.write_text(file.read_text().replace('"baselines": {}', '"baselines": {"test": {"majority": 0.6}}'))
    told = "\n".join(report([folder])["words"])
    assert "**Not learned:** in invented/classify no arm is shown to be better than a baseline" in told
    assert "The common claim" not in told


def test_an_arm_that_has_not_learned_is_named_and_its_condition_rules_no_claim_out(tmp_path):
    folder = made_up(tmp_path / "s", {"causal": 70.0, "bidirectional": 40.0, "repeated": 72.0})
    for file in folder.glob("runs/*/*/*/*/metrics.json"):
        file.write_text(file.read_text().replace('"baselines": {}', '"baselines": {"test": {"majority": 0.6}}'))
    found = report([folder])
    told = "\n".join(found["words"])
    assert "**Not shown to be better than what needs no model:**" in told
    assert "\n- bidirectional on invented/classify (" in told
    assert "The common claim" not in told and "**Not learned:**" not in told
    table = written(found, tmp_path / "out")[0].read_text()
    assert [line.split(" | ")[0][2:] for line in table.splitlines() if " † |" in line] == ["bidirectional"]


def test_a_difference_that_holds_alone_and_not_among_all_is_marked(tmp_path):
    chances = {"causal": 60.0, "bidirectional": 90.0} | {f"unmask:{n}": 60.0 for n in range(12)}
    chances["unmask:0"] = 64.0
    found = report([made_up(tmp_path / "s", chances)])
    gaps = {one["name"]: one["difference"] for one in found["conditions"][0]["arms"][1:]}
    for gap in gaps.values():
        assert gap["together"] == 13 and gap["low_together"] < gap["low"] < gap["high"] < gap["high_together"]
    marked = {
        name for name, gap in gaps.items() if gap["low"] * gap["high"] > 0 > gap["low_together"] * gap["high_together"]
    }
    assert "unmask:0" in marked and "bidirectional" not in marked  # 4 points are found alone, 30 in any company
    table = written(found, tmp_path / "out")[0].read_text()
    assert {line.split(" | ")[0][2:] for line in table.splitlines() if ", barely |" in line} == marked


def test_the_two_halves_of_which_way_round_are_told_apart(done):
    (condition,) = report([done[0]])["conditions"]
    halves = {part["name"]: part for part in condition["parts"] if part["name"].endswith("decides")}
    assert set(halves) == {"what follows decides", "what precedes decides"}
    after = condition["diagnostic"]["causal"]["after"]
    assert halves["what follows decides"]["n"] == after["of"]
    assert halves["what precedes decides"]["n"] == condition["diagnostic"]["causal"]["before"]["of"]
    told = " ".join(report([done[0]])["words"])
    assert "which-way-round/ner is two sets in one: where what follows decides it" in told
    of_halves = [gap for half in halves.values() for one in half["arms"].values() if (gap := one.get("difference"))]
    gaps = [one["difference"] for one in condition["arms"] if "difference" in one]
    gaps += [pair[kind] for pair in condition["pairs"] for kind in ("difference", "beyond") if kind in pair]
    counted = [gap for gap in (*gaps, *of_halves) if gap["low"] is not None]
    assert len(of_halves) > len(halves) and f"Of {len(counted)} differences that are told here, " in told  # of all arms


def test_what_could_have_been_asked_and_was_not_is_said(done, tmp_path):
    told = report([done[0]])["words"][-1]
    assert "Not measured here at all: adaptation by MLM, a model that was made bidirectional, questions, " in told
    assert "a curve over the steps of adaptation, a curve over the size of the training set." in told
    assert "Only two rates were tried on which-way-round/ner" in told and ": each arm's is at an end." in told


def test_arms_that_saw_other_rows_are_not_compared(tmp_path):
    folder = made_up(tmp_path / "s", {"causal": 50.0, "bidirectional": 50.0}, seeds=2)
    file = next(folder.glob("runs/*/bidirectional/*/seed-1/metrics.json"))
    whole = file.read_text()
    file.write_text(whole.replace('"data_order": "1"', '"data_order": "other"'))
    with pytest.raises(TrainingError, match="seed 1: bidirectional and causal did not see the same rows"):
        report([folder])
    file.write_text(whole.replace('"head_start": "1"', '"head_start": "other"'))
    with pytest.raises(TrainingError, match="seed 1: bidirectional and causal did not begin with the same weights"):
        report([folder])
    causal = next(folder.glob("runs/*/causal/*/seed-1/metrics.json"))
    for path, dtype in ((causal, "float32"), (file, "bfloat16")):
        path.write_text(json.dumps(json.loads(whole) | {"dtype": dtype}))
    with pytest.raises(TrainingError, match=r"did not compute in the same numbers.* delete those in runs/invented--cl"):
        report([folder])


def test_a_group_may_have_a_line_separator_in_its_name(tmp_path):
    folder = made_up(tmp_path / "s", {"causal": 50.0, "bidirectional": 50.0}, seeds=2)
    before = report([folder])["conditions"][0]["arms"]
    for file in folder.glob("runs/*/*/*/*/judged.test.jsonl"):
        lines = [json.loads(line) for line in file.read_text().split("\n") if line]
        named = [line | {"group": f"one\u2028{line['id']}"} for line in lines]
        file.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in named), encoding="utf-8")
    assert report([folder])["conditions"][0]["arms"] == before


def test_a_folder_without_a_finished_run_has_no_report(tmp_path):
    with pytest.raises(TrainingError, match="holds no study"):
        report([tmp_path])
    folder = made_up(tmp_path / "s", {"causal": 50.0})
    shutil.rmtree(folder / "runs")
    with pytest.raises(TrainingError, match="no run of the arm causal has been scored"):
        report([folder])


def test_a_report_made_elsewhere_is_taken_over_as_it_stands(done, tmp_path):
    """And a condition that is in both is that of the folder."""
    first = report([made_up(tmp_path / "s", {"causal": 60.0, "bidirectional": 72.0})])
    written(first, tmp_path / "s")
    shutil.rmtree(tmp_path / "s" / "runs")
    both = report([done[0], tmp_path / "s" / "report.json"])
    alone = report([done[0]])
    for part in ("conditions", "curves"):
        assert json.loads(json.dumps(both[part])) == json.loads(json.dumps([*first[part], *alone[part]]))
    removed = next(text for text in both["words"] if text.startswith("**Removing the mask, and nothing else,**"))
    assert "invented/classify +1" in removed and "which-way-round/ner" in removed
    (folder,) = [made_up(tmp_path / "t", {"causal": 60.0, "bidirectional": 50.0})]
    again = report([folder, tmp_path / "s" / "report.json"])
    assert again["conditions"] == report([folder])["conditions"] and len(again["curves"]) == 1
    other = [each | {"method": "lora"} for each in first["conditions"]]
    (tmp_path / "other.json").write_text(json.dumps(first | {"conditions": other}))
    assert len(report([folder, tmp_path / "other.json"])["conditions"]) == 2
    only = report([tmp_path / "s" / "report.json"])
    assert only["words"] == first["words"] and only == json.loads(json.dumps(first))


def test_one_task_learned_by_two_models_is_told_by_both_names(done, tmp_path):
    other = json.loads(json.dumps(report([done[0]]), default=str))
    for each in other["conditions"]:
        each["model"] = "another-model"
    (tmp_path / "other.json").write_text(json.dumps(other))
    found = report([tmp_path / "other.json", done[0]])
    assert [each["name"] for each in found["conditions"]] == ["which-way-round/ner"] * 2
    text = next(text for text in found["words"] if text.startswith("**Removing the mask, and nothing else,**"))
    assert "which-way-round/ner (another-model, full)" in text and "which-way-round/ner (tiny-gpt2, full)" in text


@pytest.mark.parametrize("text", ["[]", "{}", '{"conditions": 3, "curves": [], "unfinished": []}', "no json"])
def test_a_file_that_is_no_report_is_refused(text, tmp_path):
    (tmp_path / "r.json").write_text(text)
    with pytest.raises(TrainingError, match=r"r\.json (is no|could not be read as a) report"):
        report([tmp_path / "r.json"])
    with pytest.raises(TrainingError, match="could not be read as a report"):
        report([tmp_path / "there_is_none.json"])


def test_what_a_study_has_not_run_yet_is_said(done, tmp_path):
    assert report([done[0]])["unfinished"] == []
    folder = made_up(tmp_path / "one", {"causal": 50.0, "repeated": 50.0})
    (folder / "runs" / "invented--classify" / "repeated" / "size-all" / "seed-0" / "metrics.json").unlink()
    found = report([folder])
    assert [(each["done"], each["planned"]) for each in found["unfinished"]] == [(9, 10)]
    assert "**Unfinished:** invented/classify (none, full), 9 of 10 runs." in found["words"]
    other = made_up(tmp_path / "other", {"causal": 50.0, "repeated": 50.0})
    shutil.rmtree(other / "runs" / "invented--classify" / "causal")
    told = report([folder, other])["words"][-1]
    assert told.endswith(
        "invented/classify (none, full), 5 of 10 runs (none of causal; so nothing of it can be compared)."
    )


def test_layers_chosen_by_share_make_a_curve_from_causal_to_bidirectional(tmp_path):
    chances = {"causal": 40.0, "bidirectional": 60.0, "unmask:middle-third": 55.0, "unmask:below-2/3": 45.0}
    found = report([made_up(tmp_path / "s", chances)])
    (curve,) = [each for each in found["curves"] if each["kind"] == "layers"]
    xs = {line: [round(x, 3) for x, _ in points] for line, points in curve["lines"].items()}
    assert xs == {"in the middle": [0.0, 0.333, 1.0], "from below": [0.0, 0.667, 1.0]}
    alone = {name: chances[name] for name in ("causal", "unmask:middle-third")}
    assert "layers" not in {each["kind"] for each in report([made_up(tmp_path / "t", alone)])["curves"]}


# -- arms and conditions -----------------------------------------------------------------------------------------------


def test_arms_are_named_as_they_are_run():
    assert arm("mntp:40").seeing == {"mask": "bidirectional", "layers": "all", "readings": 1}
    assert arm("next:40").mask == "causal" and arm("next:40").steps == 40
    assert arm("repeated").readings == 2 and arm("repeated:3").readings == 3
    assert arm("unmask:middle-third").layers == "middle-third"
    assert arm("unmask:middle-third").share == ("middle", 1 / 3) and arm("unmask:above-2/3").share == ("above", 2 / 3)
    assert arm("unmask:0,1").share is None and arm("causal").share is None
    assert arm("mntp").name == "mntp:200"
    assert arm("encoder:bert-mini").model == "bert-mini"


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("causal", "upside-down"), "the arm is 'upside-down'; give causal, "),
        (("bidirectional",), "causal must be among them"),
        (("causal", "mntp", "mntp:200"), "one is there twice"),
        (("causal", "mntp:many"), "the arm is 'mntp:many'"),
        (("causal", "mntp:0"), "the arm is 'mntp:0'"),
        (("causal", "repeated:1"), "the arm is 'repeated:1'; give .*repeated:3"),
    ],
)
def test_arms_that_cannot_be_compared_are_refused(names, message):
    with pytest.raises(DataError, match=message):
        arms(names)


@pytest.mark.parametrize("wrong", [{"learning_rates": (1e-3, -1.0)}, {"adaptation_rate": float("nan")}])
def test_learning_rates_that_are_none_are_refused(wrong):
    with pytest.raises(DataError, match="the learning rate (-1|nan) cannot be used"):
        replace(STUDY, **wrong)


def test_sizes_without_the_whole_set_are_refused():
    with pytest.raises(DataError, match="the sizes leave out the whole training set"):
        replace(STUDY, sizes=(4, 8))


def test_one_file_is_dealt_by_its_groups_and_always_in_the_same_way(tmp_path):
    from labkit.datasets.squad import write_squad

    file = write_squad(tmp_path / "mine.json", read("qa", "field-notes", "train")[:120])
    first, last = conditions([f"qa:{file}"])
    assert (first.name, last.name) == ("mine/question-first", "mine/question-last")
    assert [each.id for each in first.test] == [each.id for each in conditions([f"qa:{file}"])[1].test]
    sides = [{each.group for each in side} for side in (first.train, first.dev, first.test)]
    assert not (sides[0] & sides[1] or sides[0] & sides[2] or sides[1] & sides[2])
    assert 0.15 < len(first.test) / 120 < 0.35


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        (["embed:field-notes"], "embed has no score that is made of single examples"),
        (["ner"], "names no data"),
        (["ner:field-notes", "ner:field-notes"], "two data sets are called field-notes/ner"),
        (["ner:a.conll,b.conll"], "names 2 files; give one, or three"),
        (["dance:field-notes"], "the task is 'dance'"),
    ],
)
def test_data_that_cannot_be_compared_on_are_refused(sources, message):
    with pytest.raises(DataError, match=message):
        conditions(sources)


@pytest.mark.parametrize("text", ["--3", "1.5", "²", "-"])
def test_what_is_no_whole_number_is_refused(text):
    assert whole_numbers("--seeds", "4, -3") == [4, -3]
    with pytest.raises(TrainingError, match=f"--seeds is '{text}', and '{text}' is no whole number"):
        whole_numbers("--seeds", text)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    """A tiny BERT in a folder as a hub lays it out, with a tokenizer; without a pooler, as many are."""
    from transformers import BertConfig, BertForMaskedLM

    import labkit

    folder, tokenizer = tmp_path_factory.mktemp("hub") / "bert-tiny", labkit.load("tiny-gpt2").tokenizer
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    BertForMaskedLM(BertConfig(vocab_size=len(tokenizer), **sizes)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("method", ["full", "lora"])
def test_an_encoder_can_be_an_arm(encoder, method, tmp_path):
    study = replace(STUDY, arms=("causal", f"encoder:{encoder}"), learning_rates=(1e-3,), seeds=(0,), method=method)
    assert run_study(study, [diagnostic()], tmp_path / "s", say=quiet) == {}
    causal, other = report([tmp_path / "s"])["conditions"][0]["arms"]
    assert other["measured_mask"] == ["bidirectional"] and "difference" in other
    assert causal["measured_mask"] == ["causal"]


def test_a_decoder_is_no_encoder(tmp_path):
    study = replace(STUDY, arms=("causal", "encoder:tiny-llama"), learning_rates=(1e-3,), seeds=(0,))
    (failure,) = run_study(study, [diagnostic()], tmp_path / "s", say=quiet).values()
    assert "the mask was to be encoder, and the one measured is causal" in failure


def test_where_every_run_failed_the_exit_code_says_so_and_not_that_the_study_is_wrong(
    tmp_path, monkeypatch, labkit_command
):
    def failing(*arguments, **options):
        raise TrainingError("the memory is full")

    monkeypatch.setattr(mask_effect, "finetune", failing)
    typed = ["--data", "ner:which-way-round", "--model", "tiny-gpt2", "--arms", "causal,bidirectional", "--seeds", "0"]
    typed += ["--learning-rates", "1e-3", "--max-train", "6", "--max-eval", "3", "--output-dir", tmp_path / "s"]
    code, _, err = labkit_command("bench", "mask-effect", *typed)
    assert code == 1 and "the memory is full" in err and "--resume tries them again" in err
    assert "2 runs failed, and there is no report yet (" in err and "no run of the arm causal has been scored" in err
