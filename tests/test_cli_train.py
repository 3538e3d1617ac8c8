"""`labkit train`, `labkit pretrain` and `labkit predict`, as a user types them."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
from transformers import EarlyStoppingCallback, Trainer

from labkit.cli.predict import FIELDS
from labkit.cli.train import HIDES, HYPERPARAMETERS, UNMASKS
from labkit.datasets import splits
from labkit.errors import LabkitError
from labkit.objectives import OBJECTIVES
from labkit.run_folder import read_json
from labkit.tasks import finetune

pytestmark = pytest.mark.end_to_end

MODEL = ["--model", "tiny-gpt2"]
SMALL = [*MODEL, "--max-steps", "2", "--batch-size", "4", "--max-train", "16", "--max-eval", "6"]


@pytest.mark.parametrize(("task", "output"), [("qa", "text"), ("embed", "similarity")])
def test_with_the_embedded_data_a_task_needs_only_a_folder(labkit_command, tmp_path, task, output):
    train = ["train", task, "--output-dir", tmp_path / "run", *SMALL]
    code, out, err = labkit_command(*train)
    assert code == 0, err
    assert "test  (n = 6)" in out and "baseline" in out and "bidirectional, 2 steps" in out
    assert "Warning" not in err
    code, out, _ = labkit_command(*train, "--resume", "--json")
    assert code == 0 and json.loads(out) == read_json(tmp_path / "run" / "metrics.json")
    first, second = FIELDS[task]
    texts = [f"--{first}", "Who mended it?", f"--{second}", "The smith of Tohmi mended it."]
    code, out, err = labkit_command("predict", task, "--model", tmp_path / "run", *texts)
    assert code == 0 and output in json.loads(out)


VALUES = {
    "max_steps": 3, "batch_size": 3, "eval_batch_size": 5, "gradient_accumulation": 2, "gradient_checkpointing": True,
    "learning_rate": 3e-4, "schedule": "cosine", "warmup": 0.2, "weight_decay": 0.03, "evaluate_every": 2, "keep": 2,
    "patience": 4, "dtype": "bfloat16", "seed": 7,
}  # fmt: skip
ALONE = {"epochs": 2, "batch_tokens": 200, "save_every": 3, "report_to": "no_such_tracker"}


def typed(options):
    """The options as they are typed; True is a flag."""
    names = {name: f"--{name.replace('_', '-')}" for name in options}
    return [part for name, value in options.items() for part in (names[name], *([] if value is True else [value]))]


@pytest.fixture
def trainer_of(labkit_command, tmp_path, monkeypatch):
    """The Trainer that a command with these options builds; it does not train."""

    def trainer_of(command, options):
        trainers = []

        def recorded(trainer, **_):
            trainers.append(trainer)
            raise LabkitError("the arguments have been recorded")

        monkeypatch.setattr(Trainer, "train", recorded)
        code, _, err = labkit_command(*command, *typed(options), "--output-dir", tmp_path / next(iter(options)))
        assert code == 2 and (not trainers or "have been recorded" in err)
        return trainers[0] if trainers else err

    return trainer_of


CLASSIFY = ["train", "classify", *MODEL, "--max-train", "40", "--max-eval", "6"]


def test_each_option_sets_its_field_of_the_training_arguments(trainer_of):
    trainer = trainer_of(CLASSIFY, VALUES)
    fields = {name: HYPERPARAMETERS[name][0] for name in VALUES.keys() - {"patience", "dtype"}}
    assert {name: getattr(trainer.args, field) for name, field in fields.items()} == {n: VALUES[n] for n in fields}
    stopping = [c for c in trainer.callback_handler.callbacks if isinstance(c, EarlyStoppingCallback)]
    assert [callback.early_stopping_patience for callback in stopping] == [4] and trainer.args.bf16
    assert VALUES.keys() | ALONE.keys() == HYPERPARAMETERS.keys()


def test_options_that_exclude_others_set_their_fields_too(trainer_of, tmp_path):
    assert trainer_of(CLASSIFY, {"epochs": 2}).args.max_steps == 5  # of 40 rows, four batches of four make a step
    packed = trainer_of(["train", "ner", *MODEL, "--max-length", "64", "--packing"], {"batch_tokens": 200})
    assert len(packed.train_dataset[0]) > 1  # an item of the data set is a whole batch
    (tmp_path / "tale.txt").write_text("The ferry left at noon, as the tide was low.\n" * 60)
    shape = ["--vocab-size", "300", "--context", "32", "--width", "64", "--layers", "1"]
    assert trainer_of(["pretrain", tmp_path / "tale.txt", *shape], {"save_every": 3}).args.save_steps == 3
    assert "the tracker 'no_such_tracker' is not installed" in trainer_of(CLASSIFY, {"report_to": "no_such_tracker"})


CHOICES = {"mask": "bidirectional", "window": "halve", "layers": "0", "method": "lora", "rank": 4, "packing": True}
HEAD = {"dropout": 0.2, "backbone_dropout": 0.3, "head_init": "zeros"}
OWN = {
    "qa": {
        "max_length": 64, "doc_stride": 9, "order": "question-last", "prompt": "evidence", "max_answer_tokens": 7,
        "null_threshold": 0.5,
    },
    "ner": {"max_length": 64, "doc_stride": 9, "label_on": "first"},
    "classify": {"max_length": 64, "pooling": "mean"},
    "embed": {"max_length": 64, "pooling": "last"},
}  # fmt: skip


@pytest.mark.parametrize("task", OWN)
def test_each_option_of_a_task_reaches_its_training(labkit_command, tmp_path, monkeypatch, task):
    calls = []

    def recorded(described, *_, **choices):
        calls.append((asdict(described), choices))
        raise LabkitError("the call has been recorded")

    monkeypatch.setattr(finetune, "finetune", recorded)
    options = CHOICES | HEAD | OWN[task] | {"attn_implementation": "eager", "preset": "quick", "resume": True}
    labkit_command("train", task, *SMALL, *typed(options), "--output-dir", tmp_path / "run")
    ((described, choices),) = calls
    assert described == OWN[task]
    assert {name: choices[name] for name in CHOICES} == CHOICES
    assert choices["head"] == {"dropout": 0.2, "backbone_dropout": 0.3, "init": "zeros"}
    assert choices["attn"] == "eager" and choices["resume"] and choices["settings"]["learning_rate"] == 3e-4
    assert len(choices["dev"]) == len(choices["test"]) == 6


def test_what_an_option_of_lm_needs_follows_from_the_objectives():
    hiding = [name for name, objective in OBJECTIVES.items() if objective.hides_tokens]
    unmasking = [name for name, objective in OBJECTIVES.items() if objective.attention == "bidirectional"]
    assert (HIDES.split(), UNMASKS.split()) == (["--objective", *hiding], ["--objective", *unmasking])


def test_rows_that_cannot_be_read_stop_a_run_unless_they_are_skipped(labkit_command, tmp_path):
    for side, sentences in (("train", 8), ("dev", 4)):
        content = "".join(f"1 {side}{k} B-PER O\n2 sleeps O O\n\n" for k in range(sentences))
        (tmp_path / f"{side}.conll").write_text(content + "1 Bo PER O\n\n1 Cy\n")
    train = ["train", "ner", *MODEL, "--max-steps", "1", "--max-length", "64", "--output-dir", tmp_path / "run"]
    train += ["--train-file", tmp_path / "train.conll", "--dev-file", tmp_path / "dev.conll"]
    code, _, err = labkit_command(*train)
    assert code == 2 and "--tag-column" in err
    code, _, err = labkit_command(*train, "--tag-column", "3")
    assert code == 2 and "train.conll, line 25: " in err and "2 of 10 rows" in err and "--skip-bad-rows" in err
    assert not (tmp_path / "run").exists()
    code, out, err = labkit_command(*train, "--tag-column", "3", "--skip-bad-rows", "--json")
    assert code == 0, err
    assert json.loads(out)["n_skipped"] == {"train": 2, "dev": 2} and json.loads(out)["n_train"] == 8


def test_own_files_through_training_folds_and_prediction(labkit_command, tmp_path):
    rows = [f"it {'pours' if k % 2 else 'shines'} on day {k},{'wet' if k % 2 else 'dry'}\n" for k in range(24)]
    source, test = tmp_path / "weather.csv", tmp_path / "test.csv"
    source.write_text("text,label\n" + "".join(rows))
    # rows without ids are numbered in each file anew, and the folds must tell them apart
    test.write_text("text,label\n" + "".join(f"then {row}" for row in rows[:6]))
    train = ["train", "classify", *MODEL, "--train-file", source, "--max-steps", "2", "--max-length", "32"]
    code, out, err = labkit_command(*train, "--output-dir", tmp_path / "run", "--json")
    assert code == 0 and (json.loads(out)["n_dev"], json.loads(out)["n_train"]) == (2, 22), err  # a tenth is held out
    folds = ["--folds", "3", "--skip-bad-rows", "--output-dir", tmp_path / "folds"]
    code, out, err = labkit_command(*train, "--test-file", test, *folds)
    assert code == 0 and "3 folds, n = 30" in out and "accuracy" in out and "±" in out, err
    assert read_json(tmp_path / "folds" / "metrics.json")["n_skipped"] == {"train": 0, "test": 0}
    predict = ["predict", "classify", "--input", source, "--output", tmp_path / "predictions.jsonl", "--json"]
    code, out, _ = labkit_command(*predict, "--model", tmp_path / "run")
    assert (code, json.loads(out)) == (0, {"output": str(tmp_path / "predictions.jsonl"), "lines": 24})
    code, _, err = labkit_command(*predict, "--model", tmp_path / "folds")
    assert code == 2 and f"not a model: give its model, {tmp_path / 'folds' / 'fold-1' / 'model'}" in err


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["train", "ner", "--data", "field-notes", "--train-file", "x.conll"], "not both"),
        (["train", "ner", "--train-file", "nowhere.conll"], "nowhere.conll does not exist"),
        (["train", "embed", "--data", "evidence"], "'embed'"),
        (["train", "ner", "--preset", "lm"], "preset is 'lm'; choose one of gemma, mini, quick"),
        (["train", "ner", "--mask", "right-to-left"], "'right-to-left'; choose one of bidirectional, causal, encoder"),
        (["train", "ner", "--mask", "encoder"], "GPT2ForTokens is causal, so it is no encoder"),
        (["train", "ner", "--window", "halve"], "GPT2ForTokens has no local layers"),
        (["train", "ner", "--rank", "4"], "--rank has an effect only with --method lora"),
        (["train", "ner", "--batch-tokens", "99"], "--batch-tokens has an effect only with --packing"),
        (["train", "ner", "--schedule", "warmup_stable_decay"], "schedule is 'warmup_stable_decay'; choose one of lin"),
        (["train", "ner", "--epochs", "0"], "num_train_epochs is 0.0; it must be above 0"),
        (["train", "qa", "--null-threshold", "nan"], "null_threshold is nan; give a finite number"),
        (["train", "ner", "--data", "no_such_set"], "the hub has no no_such_set"),
        (["train", "lm", "--objective", "next", "--layers", "0"], "an effect only with --objective mlm or mntp"),
        (["train", "lm", "--objective", "next", "--profile", "zz"], "--profile is 'zz'; choose one of ci, laptop"),
        (["train", "lm", "--objective", "mlm", "--window", "global"], "GPT2LMHeadModel has no local layers"),
        (["train", "ner", "--order", "question-last"], "No such option"),
        (["train", "classify", "--epochs", "inf"], "epochs"),
        (["predict", "ner", *MODEL], "give --input with a file, or --text"),
        (["predict", "qa", *MODEL, "--input", "a", "--question", "b"], "or --question and --context"),
        (["predict", "ner", *MODEL, "--text", "x"], "was not fine-tuned for a task"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_writes_nothing(labkit_command, tmp_path, arguments, complaint):
    small = MODEL if "lm" in arguments else SMALL
    extra = [*small, "--output-dir", tmp_path / "run"] if arguments[0] == "train" else []
    code, out, err = labkit_command(*arguments, *extra)
    messages = [line for line in err.splitlines() if line.startswith("labkit: ")]
    assert code == 2 and out == "" and len(messages) == 1 and complaint in messages[0], err
    assert not (tmp_path / "run").exists()


def test_the_sides_of_a_folder_laid_out_as_on_the_hub(tmp_path):
    import datasets

    for split in ("train", "validation"):
        rows = {"text": [f"{split} {k}" for k in range(6)], "label": ["wet", "dry"] * 3}
        datasets.Dataset.from_dict(rows).to_parquet(tmp_path / "data" / f"{split}-00000-of-00001.parquet")
    train, dev, test = splits.sides("classify", str(tmp_path))
    assert [example.text for example in dev] == [f"validation {k}" for k in range(6)]
    assert (len(train), len(test)) == (6, 0)
