"""From text files to a GPT-2 and its bits per byte; killed at any moment, the run resumes and ends the same."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import time
import warnings
from types import SimpleNamespace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

import labkit
from labkit import pretrain as pretraining
from labkit.decoder.running import evaluating
from labkit.errors import DataError, ModelError, TrainingError
from labkit.pretrain import (
    Shape,
    bits_per_byte,
    encode_all,
    new_model,
    pretrain,
    sample,
    train_tokenizer,
    validation_loss,
)
from labkit.run_folder import SEAL, read_json
from labkit.training import Settings

pytestmark = pytest.mark.end_to_end

SHAPE = Shape(vocab_size=300, context=32, width=64, layers=2)  # with a dropout of 0.1
# logs, evaluations and checkpoints at steps that do not coincide
SETTINGS = Settings(max_steps=20, batch_size=4, learning_rate=3e-3, log_every=3, evaluate_every=5, save_every=6)


def sentences(n: int, seed: int = 0) -> str:
    rng = random.Random(seed)
    words = "the cat sat on a mat while dogs ran away from rain and sun".split()
    return "".join(" ".join(rng.choices(words, k=rng.randint(3, 9))).capitalize() + ".\n" for _ in range(n))


def contents(folder) -> dict[str, str]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def quiet(text: str) -> None:
    """For `say`."""


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    file = tmp_path_factory.mktemp("texts") / "a.txt"
    file.write_bytes(sentences(150).encode())
    return file


@pytest.fixture(scope="module")
def finished(text, tmp_path_factory):
    """A run that nobody interrupted: .folder, .metrics, .said, and .model and .tokenizer as they were in memory."""
    folder, said, kept = tmp_path_factory.mktemp("finished") / "run", [], {}
    save = pretraining.save_model

    def remembering(model, tokenizer, run):
        kept.update(model=model, tokenizer=tokenizer)
        return save(model, tokenizer, run)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pretraining, "save_model", remembering)
        metrics = pretrain([text], folder, shape=SHAPE, settings=SETTINGS, say=said.append)
    return SimpleNamespace(folder=folder, metrics=metrics, said=said, **kept)


@pytest.fixture(scope="module")
def tokenizer(text):
    return train_tokenizer([text.read_text(encoding="utf-8")], SHAPE.vocab_size, SHAPE.context)


def test_a_run_leaves_its_configuration_its_curve_its_model_and_its_metrics(finished, text):
    assert {path.name for path in finished.folder.iterdir()} == {
        "config.json", "metrics.json", "trainer_state.json", "model", "tokenizer", "checkpoints",
    }  # fmt: skip
    metrics = read_json(finished.folder / "metrics.json")
    assert metrics == finished.metrics
    assert set(metrics) == {
        "seconds", "tokens_per_second", "peak_memory_bytes", "seed", "n_train", "n_eval", "bits_per_byte", "parameters",
        "steps",
    }  # fmt: skip
    content = text.read_bytes()
    cut = int(len(content) * 0.9)
    assert metrics["n_eval"] == len(content) - cut
    assert metrics["n_train"] == len(finished.tokenizer(content[:cut].decode())["input_ids"]) + 1
    assert metrics["parameters"] == sum(parameter.numel() for parameter in finished.model.parameters())
    assert (metrics["steps"], metrics["seed"]) == (20, 0)
    assert metrics["tokens_per_second"] * metrics["seconds"] == pytest.approx(20 * 4 * 32)
    config = read_json(finished.folder / "config.json")
    assert config["texts"] == {"a.txt": hashlib.sha256(content).hexdigest()}


def test_it_learns_and_is_measured_on_the_part_it_never_saw(finished, text):
    history = read_json(finished.folder / "trainer_state.json")["log_history"]
    curve = [entry["loss"] for entry in history if "loss" in entry]
    assert curve[-1] < curve[0] - 0.5
    assert [entry["step"] for entry in history if "val_loss" in entry] == [5, 10, 15, 20]
    held_out = text.read_text(encoding="utf-8")[int(len(text.read_text(encoding="utf-8")) * 0.9) :]
    with evaluating(finished.model) as model:
        expected = token_by_token(model, finished.tokenizer, held_out)
    assert finished.metrics["bits_per_byte"]["a.txt"] == pytest.approx(expected, rel=1e-5)


def test_transformers_and_labkit_load_the_model_and_read_text_as_it_was_trained_on(finished, text):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    content = text.read_text(encoding="utf-8") + "naïve 🙂\t<pad>\n"
    ids = finished.tokenizer(content, verbose=False)["input_ids"]
    lm = labkit.load(finished.folder / "model", device="cpu")
    reloaded = AutoTokenizer.from_pretrained(finished.folder / "model"), lm.tokenizer
    for tokenizer in reloaded:
        assert tokenizer(content, verbose=False)["input_ids"] == ids
        assert tokenizer.decode(ids) == content
        assert (tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.mask_token_id) == (0, 1, 2)
    batch = torch.tensor([ids[:32]])
    with evaluating(finished.model) as model:
        expected = model(batch).logits
        torch.testing.assert_close(
            AutoModelForCausalLM.from_pretrained(finished.folder / "model")(batch).logits, expected
        )
        torch.testing.assert_close(lm.model(batch).logits, expected)


def test_a_finished_run_is_given_back_at_once(finished, text, monkeypatch):
    monkeypatch.setattr(pretraining, "train", lambda *args, **kwargs: pytest.fail("it was trained again"))
    before = contents(finished.folder)
    said = []
    metrics = pretrain([text], finished.folder, shape=SHAPE, settings=SETTINGS, resume=True, say=said.append)
    assert metrics == finished.metrics
    assert contents(finished.folder) == before
    assert said == [f"{finished.folder} is finished: 20 steps"]


_RUN = """
    import os, signal, sys
    from pathlib import Path
    from labkit import pretraining, run_folder
    from tests.test_pretraining import SETTINGS, SHAPE

    text, folder, moment, count = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
    calls = []

    def killed(*_):
        calls.append(1)
        if len(calls) == count:
            os.kill(os.getpid(), signal.SIGKILL)

    if moment == "between the files of a checkpoint":
        from transformers import Trainer

        save = Trainer._save_optimizer_and_scheduler

        def half(self, output_dir):
            Path(output_dir, "optimizer.pt").write_bytes(b"half of it")
            killed()
            save(self, output_dir)

        Trainer._save_optimizer_and_scheduler = half
    elif moment == "before the seal":
        seal = run_folder.RunFolder.seal
        run_folder.RunFolder.seal = lambda *args, **facts: (killed(), seal(*args, **facts))
    elif moment == "while old checkpoints are removed":
        rmtree = run_folder.shutil.rmtree

        def some(folder, *args, **kwargs):
            if Path(folder).name.startswith("checkpoint-"):
                next(Path(folder).iterdir()).unlink()
                killed()
            rmtree(folder, *args, **kwargs)

        run_folder.shutil.rmtree = some
    elif moment == "while the model is saved":
        from transformers import PreTrainedTokenizerFast

        tokenizer_save = PreTrainedTokenizerFast.save_pretrained
        PreTrainedTokenizerFast.save_pretrained = lambda *args: (killed(), tokenizer_save(*args))
    elif moment == "before the metrics":
        write = run_folder.write_whole
        run_folder.write_whole = lambda path, text: (path.name == "metrics.json" and killed(), write(path, text))
    else:
        assert moment == "never, by itself"
    pretraining.pretrain([text], folder, shape=SHAPE, settings=SETTINGS, resume=True)
"""

posix = pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="Windows has no SIGKILL")


def start(tmp_path, text, folder, moment="never, by itself", count=1) -> subprocess.Popen:
    """The run in a process of its own."""
    script = tmp_path / "run.py"
    script.write_text(textwrap.dedent(_RUN))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([os.getcwd(), *sys.path])}
    environment["OMP_NUM_THREADS"] = str(torch.get_num_threads())  # sums in the same order as here
    command = [sys.executable, str(script), str(text), str(folder), moment, str(count)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def assert_ended_as_if_never_interrupted(folder, finished) -> None:
    from safetensors.torch import load_file

    history, expected = (read_json(each / "trainer_state.json")["log_history"] for each in (folder, finished.folder))
    for key in ("loss", "val_loss", "learning_rate"):
        curve, wanted = ({e["step"]: e[key] for e in each if key in e} for each in (history, expected))
        assert curve == pytest.approx(wanted, abs=1e-6)
    metrics = read_json(folder / "metrics.json")
    assert metrics["bits_per_byte"] == pytest.approx(finished.metrics["bits_per_byte"], abs=1e-6)
    assert metrics["tokens_per_second"] * metrics["seconds"] == pytest.approx(20 * 4 * 32)
    assert contents(folder / "tokenizer") == contents(finished.folder / "tokenizer")
    model, wanted = (load_file(each / "model" / "model.safetensors") for each in (folder, finished.folder))
    assert model.keys() == wanted.keys()
    for name in model:
        torch.testing.assert_close(model[name], wanted[name], rtol=0, atol=1e-6)
    assert not list(folder.rglob(".writing-*"))
    assert all((checkpoint / SEAL).exists() for checkpoint in (folder / "checkpoints").iterdir())


def resumed(folder, text) -> list[str]:
    said: list[str] = []
    pretrain([text], folder, shape=SHAPE, settings=SETTINGS, resume=True, say=said.append)
    return said


@posix
@pytest.mark.timeout(900)  # three processes, on a machine that may be busy
def test_a_run_killed_while_it_writes_a_checkpoint_and_again_at_a_random_moment_ends_the_same(finished, text, tmp_path):
    folder = tmp_path / "run"
    process = start(tmp_path, text, folder, "between the files of a checkpoint", count=2)
    _, err = process.communicate(timeout=600)
    assert process.returncode == -signal.SIGKILL, err
    assert not (folder / "checkpoints" / "checkpoint-12" / SEAL).exists()
    before = contents(folder)
    with pytest.raises(TrainingError, match="holds a run already: --resume"):
        pretrain([text], folder, shape=SHAPE, settings=SETTINGS)
    assert contents(folder) == before

    process = start(tmp_path, text, folder)
    lines = [process.stderr.readline() for _ in range(3)]  # until it trains
    assert lines[2] == "resuming from step 6 of 20\n", lines
    moment = random.uniform(0, 1.2 * finished.metrics["seconds"])
    time.sleep(moment)
    process.kill()
    process.communicate()
    said = resumed(folder, text)
    assert any(line.startswith("resuming from step ") or "is finished" in line for line in said), (moment, said)
    assert_ended_as_if_never_interrupted(folder, finished)


@posix
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("moment", "count", "last"),
    [
        ("between the files of a checkpoint", 1, None),
        ("before the seal", 1, None),
        ("before the seal", 3, 12),
        ("while old checkpoints are removed", 1, 18),
        ("while old checkpoints are removed", 2, 20),
        ("while the model is saved", 1, None),  # the tokenizer, at the beginning
        ("while the model is saved", 2, 20),
        ("before the metrics", 1, 20),
    ],
)
def test_a_run_killed_at_any_delicate_moment_ends_the_same(finished, text, tmp_path, moment, count, last):
    process = start(tmp_path, text, tmp_path / "run", moment, count)
    _, err = process.communicate(timeout=600)
    assert process.returncode == -signal.SIGKILL, err
    resuming = [line for line in resumed(tmp_path / "run", text) if line.startswith("resuming")]
    assert resuming == ([f"resuming from step {last} of 20"] if last else [])
    assert_ended_as_if_never_interrupted(tmp_path / "run", finished)


_LAUNCHED = """
    import sys
    from labkit.pretrain import Shape, pretrain
    from labkit.training import Settings

    text, folder, batch_size = sys.argv[1:]
    settings = Settings(12, batch_size=int(batch_size), learning_rate=3e-3)
    pretrain([text], folder, shape=Shape(300, 32, 64, 1, dropout=0.0), settings=settings, repeats=0.5)
"""


@posix
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_processes_leave_the_run_folder_of_one_with_twice_the_batch_and_say_everything_once(text, tmp_path):
    script = tmp_path / "run.py"
    script.write_text(textwrap.dedent(_LAUNCHED))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([os.getcwd(), *sys.path]), "OMP_NUM_THREADS": "1"}
    said = []
    for processes, batch_size in ((1, 8), (2, 4)):
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
        command = [sys.executable, *torchrun, str(script), str(text), str(tmp_path / str(processes)), str(batch_size)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
        assert (done.returncode, done.stdout) == (0, ""), done.stderr
        said.append([line.split(":")[0] for line in done.stderr.splitlines() if not line.startswith("  ")])
    assert said[0] == said[1]
    one, two = (read_json(tmp_path / each / "metrics.json") for each in "12")
    assert two["bits_per_byte"] == pytest.approx(one["bits_per_byte"], abs=1e-4)
    assert two["n_train"] == one["n_train"]
    names = [set(contents(tmp_path / each)) for each in "12"]
    assert {name for name in names[0] if "rng_state" not in name} == {n for n in names[1] if "rng_state" not in n}


@pytest.mark.timeout(900)
def test_a_user_sees_only_lines_of_labkit(finished, text, tmp_path):
    process = start(tmp_path, text, tmp_path / "run")
    out, err = process.communicate(timeout=600)
    assert (process.returncode, out) == (0, ""), err
    assert err.splitlines() == finished.said


@pytest.fixture(scope="module")
def one_broken_off(text, tmp_path_factory):
    folder = tmp_path_factory.mktemp("broken off") / "run"

    def breaks_off(*_):
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
        patch.setattr(pretraining, "save_model", breaks_off)
        pretrain([text], folder, shape=SHAPE, settings=Settings(2, batch_size=1), say=quiet)
    assert (folder / "checkpoints" / "checkpoint-2" / SEAL).exists()
    return folder


@pytest.fixture
def broken_off(one_broken_off, tmp_path):
    """A run folder with two checkpoints and no metrics, yours to change."""
    return shutil.copytree(one_broken_off, tmp_path / "broken off")


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"settings": Settings(3, batch_size=1)}, "settings.max_steps was 2, now 3"),
        ({"settings": Settings(2, batch_size=1, seed=5)}, "settings.seed was 0, now 5"),
        ({"shape": Shape(300, 32, 64, 1)}, "shape.layers was 2, now 1"),
        ({"held_out": 0.2}, "held_out was 0.1, now 0.2"),
        ({"repeats": 0.5}, "repeats was 0.0, now 0.5"),
        ({"first_length": 8}, "first_length was None, now 8"),
    ],
)
def test_a_run_is_not_resumed_with_another_configuration_and_stays_as_it_is(broken_off, text, changes, difference):
    before = contents(broken_off)
    same = {"shape": SHAPE, "settings": Settings(2, batch_size=1)}
    with pytest.raises(TrainingError, match=f"another configuration: {difference}$"):
        pretrain([text], broken_off, **same | changes, resume=True, say=quiet)
    assert contents(broken_off) == before


def test_a_text_with_one_other_character_is_another_configuration(broken_off, text, tmp_path):
    before = contents(broken_off)
    content = text.read_text(encoding="utf-8")
    (tmp_path / "a.txt").write_bytes((content[:100] + "#" + content[101:]).encode())
    with pytest.raises(
        TrainingError, match=r"another configuration: texts\.a\.txt was '[0-9a-f]{64}', now '[0-9a-f]{64}'$"
    ):
        pretrain(
            [tmp_path / "a.txt"], broken_off, shape=SHAPE, settings=Settings(2, batch_size=1), resume=True, say=quiet
        )
    assert contents(broken_off) == before


def test_a_run_with_an_altered_checkpoint_is_not_resumed_and_stays_as_it_is(broken_off, text):
    file = broken_off / "checkpoints" / "checkpoint-2" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    before = contents(broken_off)
    with pytest.raises(
        TrainingError, match=r"checkpoint-2: model.safetensors is not what was saved \(sha256 differs\)"
    ):
        pretrain([text], broken_off, shape=SHAPE, settings=Settings(2, batch_size=1), resume=True, say=quiet)
    assert contents(broken_off) == before


def write(file, content: bytes):
    file.write_bytes(content)
    return file


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "t.txt is empty"),
        (b" \n", "t.txt is empty"),
        (b"caf\xe9", r"t.txt is not UTF-8 text \(byte 3\)"),
        (b"a word or two", r"the text has \d+ tokens to train on, and one row takes 32: add text"),
    ],
)
def test_a_text_that_cannot_be_trained_on_is_one_clear_error_and_nothing_is_written(tmp_path, content, complaint):
    with pytest.raises(DataError, match=complaint):
        pretrain([write(tmp_path / "t.txt", content)], tmp_path / "run", shape=SHAPE, settings=SETTINGS, say=quiet)
    assert [path.name for path in tmp_path.iterdir()] == ["t.txt"]


def test_a_folder_without_text_is_one_clear_error_and_nothing_is_written(tmp_path):
    with pytest.raises(DataError, match="holds no text"):
        pretrain([tmp_path], tmp_path / "run", shape=SHAPE, settings=SETTINGS, say=quiet)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("wrong", "error", "complaint"),
    [
        ({"held_out": 1.0}, TrainingError, r"held-out share 1.0 must be in \[0, 1\)"),
        ({"held_out": -0.1}, TrainingError, r"held-out share -0.1 must be in \[0, 1\)"),
        ({"repeats": 1.1}, TrainingError, r"share of repeated rows 1.1 in \[0, 1\]"),
        ({"settings": Settings(2, report_to="my_tracker")}, ModelError, "'my_tracker' is not installed"),
    ],
)
def test_what_cannot_be_done_is_one_clear_error_and_nothing_is_written(text, tmp_path, wrong, error, complaint):
    with pytest.raises(error, match=complaint):
        pretrain([text], tmp_path / "run", **{"shape": SHAPE, "settings": SETTINGS} | wrong, say=quiet)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        ({"width": 100}, "width 100 is no multiple of 64"),
        ({"width": 0}, "width 0 is no multiple of 64"),
        ({"width": -64}, "width -64 is no multiple of 64"),
        ({"vocab_size": 258}, "needs 256 bytes and 3 special tokens; 258 is less"),
        ({"context": 1}, "context 1 must be at least 2 tokens"),
        ({"layers": 0}, "layers 0 at least 1"),
        ({"dropout": 1.0}, r"dropout 1.0 in \[0, 1\)"),
        ({"dropout": -0.1}, r"dropout -0.1 in \[0, 1\)"),
    ],
)
def test_a_shape_that_no_gpt2_has_is_refused_with_what_was_given(wrong, complaint):
    with pytest.raises(TrainingError, match=complaint):
        Shape(**wrong)


def test_two_texts_of_one_name_are_measured_each_and_nothing_held_out_is_no_evaluation(tmp_path):
    files = []
    for i in (1, 2):
        (tmp_path / str(i)).mkdir()
        files.append(write(tmp_path / str(i) / "a.txt", sentences(40, seed=i).encode()))
    small = {"shape": Shape(300, 32, 64, 1), "settings": Settings(1, batch_size=1), "say": quiet}
    metrics = pretrain(files, tmp_path / "run", **small)
    assert len(metrics["bits_per_byte"]) == 2
    assert len(set(metrics["bits_per_byte"].values())) == 2
    assert metrics["n_eval"] == sum(len(file.read_bytes()) - int(len(file.read_bytes()) * 0.9) for file in files)
    metrics = pretrain(files, tmp_path / "all", held_out=0.0, **small)
    assert (metrics["bits_per_byte"], metrics["n_eval"]) == ({}, 0)


@settings(max_examples=50, deadline=None)
@given(text=st.text(max_size=40))
@example(text="The cat \t sat\n <pad>\r\n  <|endoftext|> .")
def test_any_text_goes_into_the_tokenizer_and_comes_back_unchanged(tokenizer, text):
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_the_tokenizer_is_the_same_whenever_it_is_trained_on_the_same_text(tokenizer, text, tmp_path):
    again = train_tokenizer([text.read_text(encoding="utf-8")], SHAPE.vocab_size, SHAPE.context)
    for name, each in (("one", tokenizer), ("two", again)):
        each.save_pretrained(tmp_path / name)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    assert len(tokenizer) == 300


def test_pad_and_mask_are_tokens_of_their_own(tokenizer):
    special = (tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.mask_token_id)
    assert special == (0, 1, 2)
    assert set(special) == set(tokenizer.all_special_ids)
    assert tokenizer.padding_side == "right"


def test_the_space_before_a_mask_belongs_to_it_as_to_a_word_whoever_loads_the_tokenizer(finished):
    from transformers import AutoTokenizer

    for each in (finished.tokenizer, AutoTokenizer.from_pretrained(finished.folder / "model")):
        plain, masked = (each(text)["input_ids"] for text in ("The cat sat.", "The cat <mask> sat."))
        place = len(each("The cat")["input_ids"])
        assert masked == [*plain[:place], 2, *plain[place:]]


def test_texts_are_joined_with_an_end_after_each_however_long_they_are(tokenizer, capfd):
    texts = ["The cat sat.", "Dogs ran. " * 100]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ids = encode_all(tokenizer, texts).tolist()
    assert ids == [*tokenizer(texts[0])["input_ids"], 0, *tokenizer(texts[1], verbose=False)["input_ids"], 0]
    assert capfd.readouterr() == ("", "")


def test_a_new_model_is_a_function_of_its_shape_and_seed_and_leaves_the_random_state():
    before = torch.get_rng_state()
    first, again, other = (new_model(SHAPE, seed).state_dict() for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(first[name], again[name]) for name in first)
    name = "transformer.h.0.attn.c_attn.weight"
    assert not torch.equal(first[name], other[name])


def test_a_new_model_has_the_size_that_was_asked_for():
    model = new_model(Shape(vocab_size=300, context=32, width=128, layers=3, dropout=0.25), seed=0)
    config = model.config
    assert (config.vocab_size, config.n_positions, config.n_embd, config.n_layer) == (300, 32, 128, 3)
    assert config.n_embd // config.n_head == 64
    assert (model.transformer.drop.p, model.transformer.h[0].mlp.dropout.p) == (0.25, 0.25)
    assert (config.eos_token_id, config.pad_token_id) == (0, 1)


class Told(torch.nn.Module):
    """A model that gives what `logits(ids)` says and notes how long the rows were that it read."""

    def __init__(self, context: int, logits):
        super().__init__()
        self.config, self.device, self.logits, self.read = SimpleNamespace(n_positions=context), "cpu", logits, []

    def forward(self, ids, use_cache):
        assert ids.shape[1] <= self.config.n_positions
        self.read.append(tuple(ids.shape))
        return SimpleNamespace(logits=self.logits(ids))


class Letters:
    """A tokenizer of one token per letter, with ids of their own: the letter at place k of a text is token k + 1."""

    eos_token_id = 0

    def __call__(self, text, verbose=True):
        return {"input_ids": list(range(1, len(text) + 1))}


LENGTHS = [1, 2, 3, 7, 8, 9, 12, 13, 15, 16, 17, 40, 100]


@pytest.mark.parametrize("context", [2, 3, 7, 8])
@pytest.mark.parametrize("length", LENGTHS)
def test_bits_per_byte_of_a_model_that_knows_nothing_count_each_token_once(context, length):
    uniform = Told(context, lambda ids: torch.zeros(*ids.shape, 128))
    bits = bits_per_byte(uniform, Letters(), "x" * length)
    assert bits == pytest.approx((length - 1) * math.log2(128) / length)  # the first has nothing before it


@pytest.mark.parametrize("context", [2, 3, 7, 8])
@pytest.mark.parametrize("length", LENGTHS)
def test_bits_per_byte_charge_every_token_by_its_own_price(context, length):
    """Whatever comes before, token k costs k nats: the sum tells a token that is left out from one counted twice."""
    prices = torch.zeros(128).double()
    prices[1 : length + 1] = -torch.arange(1, length + 1).double()
    rest = 1 - prices[1 : length + 1].exp().sum()
    prices[0] = rest.log() if length else 0.0
    prices[length + 1 :] = -torch.inf
    priced = Told(context, lambda ids: prices.expand(*ids.shape, 128))
    expected = sum(range(2, length + 1)) / math.log(2) / length
    assert bits_per_byte(priced, Letters(), "x" * length, batch_size=3) == pytest.approx(expected, rel=1e-5, abs=1e-9)


def token_by_token(model, tokenizer, text: str) -> float:
    """Bits per byte, one token at a time: what is before it in the window in which it is counted is its context."""
    ids = tokenizer(text, verbose=False)["input_ids"]
    context = model.config.n_positions
    nats = 0.0
    for place in range(1, len(ids)):
        window = 0 if place < context else ((place - context) // (context // 2) + 1) * (context // 2)
        with torch.no_grad():
            logits = model(torch.tensor([ids[window:place]])).logits[0, -1]
        nats -= float(F.log_softmax(logits, -1)[ids[place]])
        assert place < context or context // 2 <= place - window < context
    return nats / math.log(2) / len(text.encode())


@pytest.mark.parametrize("context", [9, 16])
def test_bits_per_byte_are_those_of_one_token_after_the_other(tokenizer, context):
    model = new_model(Shape(300, context, 64, 1), seed=0).eval()
    model.lm_head.weight.data *= 20  # opinions, so that places and contexts matter
    for n_sentences in (1, 2, 4):
        text = sentences(n_sentences, seed=5) + "é"  # two bytes
        bits = bits_per_byte(model, tokenizer, text, batch_size=2)
        assert bits == pytest.approx(token_by_token(model, tokenizer, text), rel=1e-5)


def test_an_untrained_model_needs_about_the_bits_of_a_uniform_choice(tokenizer):
    text = sentences(20, seed=1)
    tokens = len(tokenizer(text, verbose=False)["input_ids"])
    bits = bits_per_byte(new_model(SHAPE, 0).eval(), tokenizer, text)
    assert bits == pytest.approx(tokens * math.log2(300) / len(text.encode()), rel=0.03)


def test_the_validation_loss_of_a_model_that_knows_nothing_is_the_logarithm_of_the_vocabulary():
    for context, length in [(8, 100), (8, 7), (32, 1)]:
        model = Told(context, lambda ids: torch.zeros(*ids.shape, 128))
        assert validation_loss(model, Letters(), ["x" * length], rows=16) == pytest.approx(math.log(128))
        assert sum(rows for rows, _ in model.read) == 16


def test_the_validation_loss_is_the_mean_over_rows_from_the_first_token_to_the_last(tokenizer):
    model = new_model(SHAPE, 0).eval()
    model.lm_head.weight.data *= 20
    texts = [sentences(10, seed=1), sentences(5, seed=2)]
    ids = encode_all(tokenizer, texts)
    last = len(ids) - 32
    rows = [ids[int(k * last / 15) :][:32] for k in range(16)]
    assert torch.equal(rows[-1], ids[-32:])
    with torch.no_grad():
        expected = sum(float(model(row[None], labels=row[None]).loss) for row in rows) / 16
    assert validation_loss(model, tokenizer, texts, rows=16) == pytest.approx(expected, rel=1e-4)


def test_a_sample_is_one_printable_line_that_the_seed_determines_and_that_fits_the_context(tokenizer, capfd):
    model = new_model(SHAPE, 0).eval()
    before = torch.get_rng_state()
    texts = [sample(model, tokenizer, seed=seed) for seed in range(20)]
    assert torch.equal(torch.get_rng_state(), before)
    assert [sample(model, tokenizer, seed=seed) for seed in range(20)] == texts
    assert len(set(texts)) > 10
    assert all(text.isprintable() for text in texts)
    assert not any("<pad>" in text or "<mask>" in text for text in texts)
    sample(model, tokenizer, prompt=sentences(20), tokens=1000)
    assert capfd.readouterr() == ("", "")


def test_a_resumed_run_uses_the_tokenizer_it_was_begun_with(broken_off, text, monkeypatch):
    monkeypatch.setattr(pretraining, "train_tokenizer", lambda *_: pytest.fail("another tokenizer was trained"))
    pretrain([text], broken_off, shape=SHAPE, settings=Settings(2, batch_size=1), resume=True, say=quiet)
    assert json.loads((broken_off / "metrics.json").read_text())["steps"] == 2


def test_a_run_that_was_moved_resumes_where_it_lies_now(broken_off, text, tmp_path):
    shutil.move(broken_off, tmp_path / "elsewhere")
    said = []
    pretrain(
        [text], tmp_path / "elsewhere", shape=SHAPE, settings=Settings(2, batch_size=1), resume=True, say=said.append
    )
    assert "resuming from step 2 of 2" in said
    assert not broken_off.exists()
