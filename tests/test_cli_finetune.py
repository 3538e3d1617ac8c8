"""`labkit train`, `labkit pretrain` and `labkit predict`, as a user types them."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from transformers import Trainer

from labkit.datasets import embedded, sources
from labkit.errors import DataError
from labkit.run_folder import read_json

pytestmark = pytest.mark.end_to_end

SMALL = ["--model", "tiny-gpt2", "--max-steps", "4", "--batch-size", "4", "--max-train", "16", "--max-eval", "6"]


@pytest.mark.parametrize("task", ["qa", "ner", "classify", "embed"])
def test_with_the_embedded_data_a_task_needs_nothing_but_a_folder(labkit_command, tmp_path, task):
    length = [] if task in ("classify", "embed") else ["--max-length", "96", "--doc-stride", "32"]
    code, out, err = labkit_command("train", task, "--output-dir", tmp_path / "run", *SMALL, *length)
    assert code == 0, err
    assert "test  (n = 6)" in out and "baseline" in out and "bidirectional, 4 steps" in out
    assert "needs about" in err and "Traceback" not in err and "Warning" not in err
    code, out, _ = labkit_command(
        "train", task, "--output-dir", tmp_path / "run", *SMALL, *length, "--resume", "--json"
    )
    assert code == 0 and json.loads(out) == read_json(tmp_path / "run" / "metrics.json")
    keys = {"qa": "text", "ner": "entities", "classify": "label", "embed": "similarity"}
    fields = {
        "qa": ["--question", "Who?", "--context", "The smith of Tohmi mended it."],
        "ner": ["--text", "The smith of Tohmi mended it."],
        "classify": ["--text", "Tohmi went bankrupt."],
        "embed": ["--first", "Tohmi went bankrupt.", "--second", "The firm had failed."],
    }[task]
    code, out, err = labkit_command("predict", task, "--model", tmp_path / "run", *fields)
    assert code == 0 and keys[task] in json.loads(out)


@pytest.mark.parametrize(
    "command",
    [
        ["pretrain", "{text}", "--vocab-size", "300", "--context", "32", "--width", "64", "--layers", "2"],
        ["train", "lm", "--objective", "mlm", "--model", "tiny-gpt2", "--train-file", "{text}", "--max-length", "32"],
    ],
    ids=["pretrain", "train lm"],
)
def test_after_a_full_memory_a_run_on_text_goes_on_with_the_option_that_its_error_names(
    labkit_command, tmp_path, monkeypatch, command
):
    text = tmp_path / "tale.txt"
    text.write_text("The ferry left at noon, as the tide was low; the harbour master had gone home.\n" * 60)
    typed = [part.format(text=text) for part in command] + ["--max-steps", "4", "--batch-size", "2"]
    step, checkpointed = Trainer.training_step, []

    def full_at_the_third(trainer, model, *rest):
        if trainer.state.global_step == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return step(trainer, model, *rest)

    def watched(trainer, model, *rest):
        checkpointed.append(any(getattr(part, "gradient_checkpointing", False) for part in model.modules()))
        return step(trainer, model, *rest)

    folder = tmp_path / "run"
    monkeypatch.setattr(Trainer, "training_step", full_at_the_third)
    code, _, err = labkit_command(*typed, "--output-dir", folder)
    assert code == 2 and "memory is full; --resume goes on" in err and "with gradient checkpointing" in err, err
    monkeypatch.setattr(Trainer, "training_step", watched)
    code, _, err = labkit_command(*typed, "--output-dir", folder, "--resume", "--gradient-checkpointing")
    assert code == 0, err
    assert "resuming from step 2 of 4" in err and checkpointed == [True, True]
    whole = tmp_path / "whole"
    assert labkit_command(*typed, "--output-dir", whole)[0] == 0 and checkpointed[2:] == [False] * 4
    one, other = (load_file(run / "model" / "model.safetensors") for run in (whole, folder))
    assert all(torch.allclose(one[name], other[name], atol=1e-6) for name in one)


def test_rows_that_cannot_be_read_stop_a_run_unless_they_are_left_out(labkit_command, tmp_path):
    for side, sentences in (("train", 8), ("dev", 4)):
        content = "".join(f"1 {side}{k} B-PER O\n2 sleeps O O\n\n" for k in range(sentences))
        (tmp_path / f"{side}.conll").write_text(content + "1 Bo PER O\n\n1 Cy\n")
    files = ["--train-file", tmp_path / "train.conll", "--dev-file", tmp_path / "dev.conll"]
    typed = ["train", "ner", *files, "--model", "tiny-gpt2", "--max-steps", "1", "--max-length", "64"]
    typed += ["--doc-stride", "16", "--output-dir", tmp_path / "run"]
    code, _, err = labkit_command(*typed)
    assert code == 2 and "--tag-column" in err
    code, _, err = labkit_command(*typed, "--tag-column", "3")
    assert code == 2 and "train.conll, line 25: " in err and "2 of 10 rows" in err and "--skip-bad-rows" in err
    assert not (tmp_path / "run").exists()
    code, out, err = labkit_command(*typed, "--tag-column", "3", "--skip-bad-rows", "--json")
    assert code == 0, err
    assert "train.conll: 2 of 10 rows are skipped" in err and "dev.conll: 2 of 6 rows are skipped" in err
    metrics = json.loads(out)
    assert (metrics["n_train"], metrics["n_dev"]) == (8, 4)
    assert metrics["n_skipped"] == {"train": 2, "dev": 2} and metrics["labels"] == ["O", "B-PER", "I-PER"]
    code, out, _ = labkit_command(
        *typed[:-1], tmp_path / "folds", "--tag-column", "3", "--skip-bad-rows", "--folds", "2", "--json"
    )
    assert code == 0 and json.loads(out)["n_skipped"] == {"train": 2, "dev": 2}


def test_folds_over_files_whose_rows_are_only_numbered(labkit_command, tmp_path):
    files = []
    for side, count in (("train", 8), ("dev", 6), ("test", 6)):
        rows = [
            {"question": f"Who {k}?", "context": f"The {side} {k} of Tohmi", "answers": [{"text": side, "start": 4}]}
            for k in range(count)
        ]
        (tmp_path / f"{side}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        files += [f"--{side}-file", tmp_path / f"{side}.jsonl"]
    small = ["--model", "tiny-gpt2", "--max-steps", "1", "--max-length", "64", "--doc-stride", "16"]
    code, out, err = labkit_command("train", "qa", *files, *small, "--folds", "2", "--output-dir", tmp_path / "run")
    assert code == 0, err
    assert "2 folds, n = 20" in out


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        (["--epochs", "inf"], "--epochs is inf; give a number"),
        (["--seed", "-1"], "seed is -1"),
        (["--weight-decay", "-1"], "decay"),
    ],
)
def test_numbers_that_mean_nothing_are_refused_at_once(labkit_command, tmp_path, wrong, complaint):
    code, _, err = labkit_command("train", "classify", "--model", "tiny-gpt2", "--output-dir", tmp_path / "run", *wrong)
    assert code == 2 and complaint in err and "Traceback" not in err
    assert not (tmp_path / "run").exists()


def test_files_of_ones_own_through_training_folds_and_prediction(labkit_command, tmp_path):
    rows = [
        {"text": f"it {'pours' if k % 2 else 'shines'} on day {k}", "label": "wet" if k % 2 else "dry"}
        for k in range(24)
    ]
    source = tmp_path / "weather.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    train = [
        "train",
        "classify",
        "--model",
        "tiny-gpt2",
        "--train-file",
        source,
        "--max-steps",
        "2",
        "--max-length",
        "32",
    ]
    code, out, err = labkit_command(*train, "--output-dir", tmp_path / "run")
    assert code == 0 and "no dev set: 2 examples are held out, 22 are trained on" in err
    code, out, err = labkit_command(*train, "--output-dir", tmp_path / "folds", "--folds", "3")
    assert code == 0 and "3 folds, n = 24; mean and 95 % interval" in out and "accuracy" in out and "±" in out
    target = tmp_path / "said.jsonl"
    code, out, _ = labkit_command(
        "predict", "classify", "--model", tmp_path / "run", "--input", source, "--output", target, "--json"
    )
    assert (code, json.loads(out)) == (0, {"output": str(target), "lines": 24})
    assert {json.loads(line)["label"] for line in target.read_text().splitlines()} <= {"wet", "dry"}


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["train", "ner", "--data", "field-notes", "--train-file", "x.conll"], "a data set, or files, not both"),
        (["train", "ner", "--dev-file", "x.conll"], "no training file beside the others"),
        (["train", "ner", "--train-file", "nowhere.conll"], "nowhere.conll does not exist"),
        (["train", "embed", "--data", "evidence"], "has nothing for the task 'embed'"),
        (["train", "qa", "--data", "which-way-round"], "has nothing for the task 'qa'"),
        (["train", "ner", "--preset", "huge"], "preset is 'huge'; choose one of gemma, mini, quick"),
        (["train", "ner", "--mask", "prefix"], "mask is 'prefix'"),
        (["train", "ner", "--label-on", "middle"], "middle"),
        (["train", "ner", "--order", "question-last"], "No such option"),
        (["train", "qa", "--learning-rate", "-1"], "learning rate -1.0 must be positive"),
        (["train", "classify", "--head-init", "ones"], "init is 'ones'"),
        (["predict", "ner", "--model", "tiny-gpt2"], "give --input with a file, or --text"),
        (["predict", "qa", "--model", "tiny-gpt2", "--input", "a", "--question", "b"], "or --question and --context"),
        (["predict", "ner", "--model", "tiny-gpt2", "--text", "x"], "was not fine-tuned for a task by labkit"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_writes_nothing(labkit_command, tmp_path, arguments, complaint):
    extra = ["--output-dir", tmp_path / "run", *SMALL] if arguments[0] == "train" else []
    code, out, err = labkit_command(*arguments, *extra)
    lines = [line for line in err.splitlines() if line.startswith("labkit: ")]
    assert code == 2 and out == "" and len(lines) == 1 and complaint in lines[0], err
    assert not (tmp_path / "run").exists()


def test_a_task_has_the_options_that_are_its_own(labkit_command):
    helps = {task: labkit_command("train", task, "--help")[1] for task in ("qa", "ner", "classify", "embed")}
    for option, tasks in {
        "--order": {"qa"}, "--null-threshold": {"qa"}, "--label-on": {"ner"}, "--pooling": {"classify", "embed"},
        "--mask": set(helps), "--folds": set(helps), "--resume": set(helps),
    }.items():  # fmt: skip
        assert {task for task, text in helps.items() if f"{option} " in text} == tasks, option


def test_the_sides_of_a_data_set(tmp_path):
    train, dev, test = sources.sides("ner", "field-notes", max_train=20, max_eval=5)
    assert (len(train), len(dev), len(test)) == (20, 5, 5)
    everything = embedded.read("ner", "field-notes", "train")
    assert [each for each in everything if each in train] == train  # drawn, and in their order
    assert sources.sides("ner", "field-notes", max_train=20)[0] == train
    assert sources.sides("ner", "field-notes", max_train=20, seed=1)[0] != train
    assert sources.sides("classify")[0] == embedded.read("classify", "which-way-round", "train")


def test_the_sides_of_a_folder_laid_out_as_the_hub_lays_it_out(tmp_path):
    import datasets

    folder = tmp_path / "weather"
    for split in ("train", "validation"):
        rows = {"text": [f"{split} {k}" for k in range(6)], "label": ["wet", "dry"] * 3}
        datasets.Dataset.from_dict(rows).to_parquet(folder / "data" / f"{split}-00000-of-00001.parquet")
    train, dev, test = sources.sides("classify", str(folder))
    assert [each.text for each in dev] == [f"validation {k}" for k in range(6)]
    assert (len(train), len(test)) == (6, 0)
    (folder / "data" / "train-00000-of-00001.parquet").unlink()
    with pytest.raises(DataError, match="has no split called train, only validation"):
        sources.sides("classify", str(folder))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(sys.platform == "win32", reason="torchrun with gloo is for POSIX systems")
@pytest.mark.parametrize("launcher", ["torchrun", "accelerate"])
def test_two_processes_score_as_one_with_twice_the_batch(tmp_path, launcher):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([os.getcwd(), *sys.path]), "OMP_NUM_THREADS": "1"}
    starts = {
        "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node"],
        # with --cpu accelerate starts one process, whatever --num_processes says; this is torchrun behind its own face
        "accelerate": ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_machines", "1", "--num_processes"],
    }
    common = ["train", "classify", "--model", "tiny-gpt2", "--epochs", "4", "--max-length", "64", "--dropout", "0"]
    common += ["--backbone-dropout", "0", "--learning-rate", "1e-3", "--patience", "0"]
    found = {}
    for processes, batch in ((1, 16), (2, 8)):
        folder = tmp_path / f"run{processes}"
        start = starts[launcher if processes == 2 else "torchrun"] + [str(processes)]
        done = subprocess.run(
            [sys.executable, *start, "-m", "labkit", *common, "--batch-size", str(batch), "--output-dir", str(folder)],
            env=environment, capture_output=True, text=True, timeout=800,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        found[processes] = read_json(folder / "metrics.json")
    one, two = found[1], found[2]
    assert one["steps"] == two["steps"]
    assert two["dev"]["accuracy"] == pytest.approx(one["dev"]["accuracy"], abs=0.02)
