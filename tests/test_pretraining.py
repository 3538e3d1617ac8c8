"""From text files to a GPT-2 and its bits per byte; a run that is killed resumes and ends the same."""

from __future__ import annotations

import hashlib
import math
import random
import shutil
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

import labkit
from labkit import pretrain as pretraining
from labkit.decoder.running import evaluating
from labkit.errors import LabkitError
from labkit.objectives import Collator
from labkit.pretrain import (
    Shape,
    TextRows,
    bits_per_byte,
    encode_all,
    new_model,
    pretrain,
    train_tokenizer,
)
from labkit.run_folder import RunFolder, read_json, silent
from labkit.training import preset

pytestmark = pytest.mark.end_to_end

SHAPE = Shape(vocab_size=300, context=32, width=64, layers=2)  # with a dropout of 0.1
# evaluations and checkpoints at steps that do not coincide
SETTINGS = preset("lm", max_steps=20, per_device_train_batch_size=4, learning_rate=3e-3, eval_steps=5, save_steps=6)
SHORT = preset("lm", max_steps=2, per_device_train_batch_size=1)


def sentences(n: int, seed: int = 0) -> str:
    rng = random.Random(seed)
    words = "the cat sat on a mat while dogs ran away from rain and sun".split()
    return "".join(" ".join(rng.choices(words, k=rng.randint(3, 9))).capitalize() + ".\n" for _ in range(n))


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    file = tmp_path_factory.mktemp("texts") / "a.txt"
    file.write_text(sentences(150), encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def finished(text, tmp_path_factory):
    """A run that nothing interrupted: .folder, .metrics, and .model and .tokenizer as they were in memory."""
    folder, kept = tmp_path_factory.mktemp("finished") / "run", {}
    save = pretraining.save

    def remembering(folder, model, tokenizer):
        kept.update(model=model, tokenizer=tokenizer)
        save(folder, model, tokenizer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pretraining, "save", remembering)
        metrics = pretrain([text], folder, shape=SHAPE, settings=SETTINGS, log=silent)
    return SimpleNamespace(folder=folder, metrics=metrics, **kept)


# -- a run -------------------------------------------------------------------------------------------------------------


def test_a_run_learns_and_leaves_its_configuration_its_curve_its_model_and_its_metrics(finished, text):
    metrics, content = read_json(finished.folder / "metrics.json"), text.read_text(encoding="utf-8")
    cut = int(len(content) * 0.9)
    assert metrics == finished.metrics
    assert pretrain([text], finished.folder, shape=SHAPE, settings=SETTINGS, resume=True, log=silent) == metrics
    assert metrics["n_eval"] == len(content) - cut
    assert metrics["n_train"] == len(finished.tokenizer(content[:cut])["input_ids"]) + 1
    assert metrics["parameters"] == sum(parameter.numel() for parameter in finished.model.parameters())
    assert (metrics["steps"], metrics["seed"]) == (20, 0)
    assert metrics["tokens_per_second"] * metrics["seconds"] == pytest.approx(20 * 4 * 32)
    digest = hashlib.sha256(text.read_bytes()).hexdigest()
    assert read_json(finished.folder / "config.json")["texts"] == {"a.txt": digest}
    history = read_json(finished.folder / "trainer_state.json")["log_history"]
    curve = [entry["loss"] for entry in history if "loss" in entry]
    assert curve[-1] < curve[0] - 0.5
    assert [entry["step"] for entry in history if "bits_per_byte" in entry] == [5, 10, 15, 20]
    with evaluating(finished.model) as model:
        expected = token_by_token(model, finished.tokenizer, content[cut:])
    assert metrics["bits_per_byte"]["a.txt"] == pytest.approx(expected, rel=1e-5)


def test_transformers_and_labkit_load_the_model_and_read_text_as_in_training(finished, text):
    content = text.read_text(encoding="utf-8") + "naïve 🙂\t<pad>\n"
    ids = finished.tokenizer(content, verbose=False)["input_ids"]
    lm = labkit.load(finished.folder / "model", device="cpu")
    for tokenizer in (AutoTokenizer.from_pretrained(finished.folder / "model"), lm.tokenizer):
        assert tokenizer(content, verbose=False)["input_ids"] == ids and tokenizer.decode(ids) == content
        assert (tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.mask_token_id) == (0, 1, 2)
        plain, masked = (tokenizer(text)["input_ids"] for text in ("The cat sat.", "The cat <mask> sat."))
        place = len(tokenizer("The cat")["input_ids"])
        assert masked == [*plain[:place], 2, *plain[place:]]  # the space before a mask belongs to it
    batch = torch.tensor([ids[:32]])
    with evaluating(finished.model) as model:
        expected = model(batch).logits
        for loaded in (AutoModelForCausalLM.from_pretrained(finished.folder / "model"), lm.model):
            torch.testing.assert_close(loaded(batch).logits, expected)


def test_epochs_are_passes_and_nothing_held_out_is_no_evaluation(text, tmp_path):
    (tmp_path / "more").mkdir()
    other = tmp_path / "more" / "a.txt"  # of the same name
    other.write_text(sentences(40, seed=1), encoding="utf-8")
    settings = SHORT | {"max_steps": -1, "num_train_epochs": 0.5, "per_device_train_batch_size": 4}
    metrics = pretrain([text, other], tmp_path / "run", shape=SHAPE, settings=settings, log=silent)
    assert metrics["steps"] == math.ceil((metrics["n_train"] - 1) // 32 * 0.5 / 4)
    assert len(set(metrics["bits_per_byte"].values())) == 2
    metrics = pretrain([text], tmp_path / "all", shape=SHAPE, settings=SHORT, held_out=0.0, log=silent)
    assert (metrics["bits_per_byte"], metrics["n_eval"]) == ({}, 0)


# -- kills and resumes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("owner", "name", "call", "last"), [(pretraining, "bits_per_byte", 2, 6), (RunFolder, "write_json", 2, 20)]
)
def test_a_run_that_is_interrupted_resumes_and_ends_as_if_it_had_not_been(
    finished, text, tmp_path, monkeypatch, owner, name, call, last
):
    calls, lines = [], []
    given = {"shape": SHAPE, "settings": SETTINGS, "log": lines.append}
    plain = getattr(owner, name)

    def interrupted(*args, **options):
        calls.append(1)
        if len(calls) == call:
            raise KeyboardInterrupt
        return plain(*args, **options)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(owner, name, interrupted)
        pretrain([text], tmp_path / "run", **given)
    folder = shutil.move(tmp_path / "run", tmp_path / "moved")
    metrics = pretrain([text], folder, resume=True, **given)
    assert f"resuming from step {last} of 20" in lines
    history, expected = (read_json(run / "trainer_state.json")["log_history"] for run in (folder, finished.folder))
    for key in ("loss", "bits_per_byte", "learning_rate"):
        curve, whole = ({e["step"]: e[key] for e in log if key in e} for log in (history, expected))
        assert curve == whole
    assert metrics["bits_per_byte"] == finished.metrics["bits_per_byte"]
    model, whole = (load_file(run / "model" / "model.safetensors") for run in (folder, finished.folder))
    assert model.keys() == whole.keys() and all(torch.equal(model[name], whole[name]) for name in model)


@pytest.mark.parametrize(
    ("content", "choices", "complaint"),
    [
        (b" \n", {}, "t.txt is empty"),
        (b"caf\xe9", {}, "t.txt, line 1: is not UTF-8"),
        (b"a word or two", {}, r"the text has \d+ tokens to train on, and one row takes 32: add text"),
        (None, {}, "without files that end in .txt"),
        (b"a word", {"first_length": 64}, "first_length is 64"),
        (b"a word", {"settings": SHORT | {"report_to": "my_tracker"}}, "'my_tracker' is not installed"),
        (b"a word", {"shape": (300, 32, 100)}, "width is 100; it must be a multiple of 64"),
    ],
)
def test_what_cannot_be_trained_is_one_clear_error_and_nothing_is_written(tmp_path, content, choices, complaint):
    if content is not None:
        (tmp_path / "t.txt").write_bytes(content)
    with pytest.raises(LabkitError, match=complaint):
        shape = Shape(*choices.pop("shape", (300, 32, 64, 2)))
        pretrain([tmp_path], tmp_path / "run", **{"shape": shape, "settings": SETTINGS} | choices, log=silent)
    assert not (tmp_path / "run").exists()


# -- rows --------------------------------------------------------------------------------------------------------------

LINE = torch.arange(1000, 1337)  # every token is its own position


def rows_of(context: int, count: int = 10**6, seed: int = 3, **options):
    rows = TextRows(LINE, count, context, seed, **options)
    return lambda k: rows[k]["ids"]


def period(row: torch.Tensor) -> int | None:
    """The length of the passage that `row` repeats; None if it repeats none."""
    lengths = range(1, len(row) // 2 + 1)
    return next((n for n in lengths if torch.equal(row[:n].repeat(len(row) // n + 1)[: len(row)], row)), None)


@pytest.mark.parametrize("context", [2, 31, 336])
def test_each_pass_reads_every_token_once_except_at_the_ends_cut_elsewhere_and_in_another_order(context):
    make, per_pass = rows_of(context), 336 // context
    starts = set()
    for number in range(4):
        rows = torch.stack([make(number * per_pass + k) for k in range(per_pass)])
        assert rows.shape == (per_pass, context)
        assert bool((rows.diff(dim=1) == 1).all())  # a stretch of the text
        tokens = rows.flatten().sort().values
        assert len(tokens.unique()) == len(tokens) == int(tokens[-1] - tokens[0]) + 1
        assert 337 - len(tokens) <= context  # less than a row and one token is left out
        starts.add(tuple(rows[:, 0].tolist()))
    assert len(starts) == 4 or per_pass == 1


def test_row_k_depends_on_the_seed_and_on_k_alone():
    choices = {"first_length": 8, "repeats": 0.8}
    in_order, another = rows_of(32, 40, **choices), rows_of(32, 40, **choices)
    expected = [in_order(k) for k in range(40)]
    torch.manual_seed(9)
    assert all(torch.equal(another(k), expected[k]) for k in random.Random(0).sample(range(40), 40))
    other_seed = rows_of(32, 40, seed=4, **choices)
    assert sum(torch.equal(other_seed(k), expected[k]) for k in range(40)) < 10


@pytest.mark.parametrize(("first", "share"), [(0, 0.3), (9400, 0.03)])  # a tenth is left in the second half of the run
def test_the_given_fraction_of_rows_repeats_a_passage_half_of_them_one_of_the_text(first, share):
    rows = range(first, first + 600)
    plain, make = rows_of(96), rows_of(96, count=10**6 if first == 0 else 10**4, repeats=0.3)
    periods = {k: length for k in rows if (length := period(make(k)))}
    assert abs(len(periods) - share * 600) < 4 * math.sqrt(600 * share * (1 - share))
    assert all(torch.equal(make(k), plain(k)) for k in rows if k not in periods)
    assert 4 <= min(periods.values()) and max(periods.values()) <= 36  # from 4 tokens to 3/8 of the row
    of_the_text = sum(torch.equal(make(k)[:length], plain(k)[:length]) for k, length in periods.items())
    assert abs(of_the_text - len(periods) / 2) < 4 * math.sqrt(len(periods) / 4)
    assert all(bool(torch.isin(make(k), LINE).all()) for k in periods)  # only tokens that occur in the text


@pytest.mark.parametrize(
    ("context", "first", "stages"),
    [
        (512, 64, {0: 64, 499: 64, 500: 128, 649: 128, 650: 256, 799: 256, 800: 512, 999: 512}),
        (64, 32, {0: 32, 799: 32, 800: 64}),  # one doubling: there is nothing between
        (64, None, {0: 64, 999: 64}),
    ],
)
def test_pieces_grow_from_the_first_length_to_the_whole_row(context, first, stages):
    rows = TextRows(LINE, 1000, context, 0, first)
    assert {row: rows.length(row) for row in stages} == stages


def test_a_batch_contains_the_pieces_of_its_rows_in_order_the_shorter_ones_where_two_stages_meet():
    text_rows = TextRows(LINE, 100, 32, 0, first_length=8)
    rows = [{"row": k, "ids": torch.arange(32) + 100 * k} for k in (50, 49)]
    pieces = text_rows.pieces(rows)
    assert [len(piece["ids"]) for piece in pieces] == [8] * 8
    batch = Collator("next", pad_id=1, seed=0)(pieces)
    assert torch.equal(batch["input_ids"].flatten(), torch.cat([row["ids"] for row in rows]))
    assert torch.equal(batch["labels"][:, :-1], batch["input_ids"][:, 1:])  # no piece predicts the next piece


# -- the tokenizer, the model, and measures ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer(text):
    return train_tokenizer([text.read_text(encoding="utf-8")], SHAPE.vocab_size, SHAPE.context)


def test_the_same_text_trains_the_same_tokenizer_and_texts_are_joined_with_an_end_after_each(tokenizer, text, capfd):
    again = train_tokenizer([text.read_text(encoding="utf-8")], SHAPE.vocab_size, SHAPE.context)
    assert again.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()
    assert len(tokenizer) == 300 and tokenizer.padding_side == "right"
    assert {tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.mask_token_id} == set(tokenizer.all_special_ids)
    texts = ["The cat sat.", "Dogs ran. " * 100]
    ids = encode_all(tokenizer, texts).tolist()
    assert ids == [*tokenizer(texts[0])["input_ids"], 0, *tokenizer(texts[1], verbose=False)["input_ids"], 0]
    assert capfd.readouterr() == ("", "")


def test_a_new_model_has_the_given_shape():
    model = new_model(Shape(vocab_size=300, context=32, width=128, layers=3, dropout=0.25), seed=0)
    config = model.config
    assert (config.vocab_size, config.n_positions, config.n_embd, config.n_layer, config.n_head) == (300, 32, 128, 3, 2)
    assert (model.transformer.drop.p, model.transformer.h[0].mlp.dropout.p) == (0.25, 0.25)


def token_by_token(model, tokenizer, text: str) -> float:
    """Bits per byte, one token at a time, each with what is before it in the window that counts it."""
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


@pytest.mark.parametrize("context", [3, 16])
def test_bits_per_byte_are_those_of_one_token_after_the_other(tokenizer, context):
    model = new_model(Shape(300, context, 64, 1), seed=0).eval()
    model.lm_head.weight.data *= 20  # so that positions and contexts matter
    text = "é" + sentences(4, seed=5)  # a letter of two bytes
    for length in (1, 3, 17, len(text)):
        bits = bits_per_byte(model, tokenizer, text[:length])
        assert bits == pytest.approx(token_by_token(model, tokenizer, text[:length]), rel=1e-5, abs=1e-9)
