"""Adapting a language model: mask tokens, filling gaps, and training runs of every objective."""

import copy
import json

import pytest
import torch
from transformers import DynamicCache

import labkit
from labkit import masks
from labkit.decoder.anatomy import CACHE
from labkit.errors import DataError, LabkitError, TrainingError
from labkit.objectives import OBJECTIVES
from labkit.tasks import lm as task
from labkit.training import preset

pytestmark = pytest.mark.end_to_end

TEXTS = [
    "The ferry left at noon because the tide was low, and the harbour master had gone home.",
    "A letter came for the old weaver. She read it twice and put it under the clock.",
    "On Friday the council met in the school; the roof of the hall had been damaged by snow.",
    "The bell was cast in two pieces and joined by a smith who had never seen one before.",
] * 3


@pytest.fixture
def gpt2():
    return labkit.load("tiny-gpt2", device="cpu")


SETTINGS = preset("lm", max_steps=4, per_device_train_batch_size=4, learning_rate=1e-3)


def quiet(text: str) -> None:
    """For `say`."""


# -- the mask token ----------------------------------------------------------------------------------------------------


def test_a_mask_token_is_added_where_there_is_none_and_starts_as_the_mean_embedding(gpt2):
    before = gpt2.model.get_input_embeddings().weight.detach().clone()
    new = task.ensure_mask_token(gpt2.model, gpt2.tokenizer)
    table = gpt2.model.get_input_embeddings().weight.detach()
    assert gpt2.tokenizer.mask_token_id == new == len(before)
    torch.testing.assert_close(table[:new], before, rtol=0, atol=0)
    torch.testing.assert_close(table[new], before.mean(0))
    assert gpt2.model.get_output_embeddings().weight is gpt2.model.get_input_embeddings().weight
    assert gpt2.tokenizer("left <mask> noon")["input_ids"].count(new) == 1
    assert task.ensure_mask_token(gpt2.model, gpt2.tokenizer) == new  # a second time it changes nothing
    assert torch.equal(gpt2.model.get_input_embeddings().weight.detach(), table)


@pytest.mark.parametrize("name", ["tiny-gpt2", "gpt2-mini"])
def test_the_space_before_a_mask_token_belongs_to_it_as_to_a_word(name):
    lm = labkit.load(name, device="cpu")
    task.ensure_mask_token(lm.model, lm.tokenizer)
    assert (
        lm.tokenizer("The ferry <mask> at noon.")["input_ids"] == lm.tokenizer("The ferry<mask> at noon.")["input_ids"]
    )


def test_a_reserved_token_is_taken_before_one_is_added(gpt2):
    gpt2.tokenizer.add_tokens("<unused0>")
    gpt2.model.resize_token_embeddings(len(gpt2.tokenizer), mean_resizing=False)
    rows = gpt2.model.get_input_embeddings().num_embeddings
    assert task.ensure_mask_token(gpt2.model, gpt2.tokenizer) == gpt2.tokenizer.convert_tokens_to_ids("<unused0>")
    assert gpt2.model.get_input_embeddings().num_embeddings == rows


# -- filling gaps ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reads", task.READS)
def test_fill_in_reads_the_logits_at_the_position_it_says(gpt2, reads):
    task.ensure_mask_token(gpt2.model, gpt2.tokenizer)
    text = "The ferry left at <mask> because the tide was <mask>."
    ids = torch.tensor([gpt2.tokenizer(text)["input_ids"]])
    hidden = (ids[0] == gpt2.tokenizer.mask_token_id).nonzero()[:, 0]
    with torch.no_grad():
        expected = gpt2.model(ids).logits[0, hidden - (1 if reads == "before" else 0)].softmax(-1)
    for answers, row in zip(task.fill_in(gpt2, text, reads=reads, top=3), expected, strict=True):
        best = row.topk(3)
        assert [a for a, _ in answers] == [gpt2.tokenizer.decode([i]) for i in best.indices.tolist()]
        assert [p for _, p in answers] == pytest.approx(best.values.tolist(), rel=1e-5)


@pytest.mark.parametrize("reads", task.READS)
def test_fill_in_scores_agree_with_one_forward_per_hidden_token(gpt2, reads):
    task.ensure_mask_token(gpt2.model, gpt2.tokenizer)
    rows = task.cut_into_rows(gpt2.tokenizer, TEXTS[:2], 40)
    scores = task.fill_in_scores(gpt2.model, gpt2.tokenizer, rows, reads=reads, positions=10_000, batch_size=3)
    nats, ranks = [], []
    with torch.no_grad():
        for row in rows:
            for i in range(1, len(row)):
                hidden = row.clone()
                hidden[i] = gpt2.tokenizer.mask_token_id
                p = gpt2.model(hidden[None]).logits[0, i - (1 if reads == "before" else 0)].softmax(-1)
                nats.append(-float(p[row[i]].log()))
                ranks.append(int((p > p[row[i]]).sum()) + 1)
    assert sorted(scores.ranks) == sorted(ranks)
    assert sum(scores.nats) == pytest.approx(sum(nats), rel=1e-4)
    assert scores.pseudo_perplexity == pytest.approx(float(torch.tensor(nats).mean().exp()), rel=1e-4)
    low, high = scores.accuracy_interval()
    assert 0 <= low <= scores.accuracy <= scores.top_5 <= 1 and scores.accuracy <= high


@pytest.mark.parametrize(
    ("text", "reads", "complaint"),
    [
        ("no gap here", "same", "nothing to fill in"),
        ("<mask> is first", "before", "no position before"),
        ("a <mask>", "left", "'same'"),
    ],
)
def test_what_cannot_be_filled_in_is_refused(gpt2, text, reads, complaint):
    with pytest.raises(DataError, match="no mask token"):
        task.fill_in(gpt2, text, reads="same")
    task.ensure_mask_token(gpt2.model, gpt2.tokenizer)
    with pytest.raises(DataError, match=complaint):
        task.fill_in(gpt2, text, reads=reads)


def test_two_models_are_asked_for_the_same_hidden_tokens(gpt2):
    task.ensure_mask_token(gpt2.model, gpt2.tokenizer)
    rows = task.cut_into_rows(gpt2.tokenizer, TEXTS, 40)
    asked = []
    for model in (gpt2.model, labkit.to_bidirectional(copy.deepcopy(gpt2.model))):
        inputs = []
        embeddings = model.get_input_embeddings()
        hook = embeddings.register_forward_pre_hook(lambda _, args, inputs=inputs: inputs.append(args[0].clone()))
        task.fill_in_scores(model, gpt2.tokenizer, rows, reads="before", positions=20)
        hook.remove()
        asked.append(inputs)
    assert asked[0] and all(torch.equal(one, other) for one, other in zip(*asked, strict=True))


def test_a_causal_model_fills_a_gap_from_its_left_context_alone(gpt2):
    task.ensure_mask_token(gpt2.model, gpt2.tokenizer)

    def probabilities() -> list[list[float]]:
        ends = ("because of fog.", "to meet the train.")
        gaps = [task.fill_in(gpt2, f"The ferry left at <mask> {end}", reads="before")[0] for end in ends]
        return [[probability for _, probability in gap] for gap in gaps]

    fog, train = probabilities()
    assert fog == pytest.approx(train, rel=1e-5)
    labkit.to_bidirectional(gpt2.model)
    fog, train = probabilities()
    assert fog != pytest.approx(train, rel=1e-5)


# -- rows --------------------------------------------------------------------------------------------------------------


def test_rows_hold_every_token_of_every_text_in_order(gpt2):
    rows = task.cut_into_rows(gpt2.tokenizer, TEXTS[:3], 16)
    assert max(len(row) for row in rows) <= 16
    whole = [i for text in TEXTS[:3] for i in gpt2.tokenizer(text)["input_ids"]]
    kept = torch.cat(rows).tolist()
    assert len(whole) - len(kept) <= 3 and set(kept) <= set(whole)  # a single token left over makes no row


@pytest.mark.parametrize("texts", [[], ["", " "]], ids=["none", "blank"])
def test_no_text_is_refused(gpt2, texts):
    with pytest.raises(DataError, match="nothing to train on"):
        task.cut_into_rows(gpt2.tokenizer, [t.strip() for t in texts], 16)


# -- runs --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_each_objective_trains_and_leaves_a_model_with_the_attention_it_needs(objective, tmp_path):
    metrics = task.train_lm(
        "tiny-gpt2", TEXTS[:6], tmp_path / "run", objective=objective, settings=SETTINGS | {"max_steps": 12},
        eval_texts=TEXTS[6:], max_length=32, say=quiet,
    )  # fmt: skip
    scores = metrics["scores"]
    assert scores["after"]["loss"] < scores["before"]["loss"]
    assert {"seconds", "tokens_per_second", "peak_memory_bytes", "seed", "n_train", "n_eval"} <= set(metrics)
    assert json.loads((tmp_path / "run" / "metrics.json").read_text()) == metrics
    saved = labkit.load(tmp_path / "run" / "model", device="cpu")
    bidirectional = OBJECTIVES[objective].attention == "bidirectional"
    assert labkit.audit(saved.model, quick=True).verdict == ("bidirectional" if bidirectional else "causal")
    assert ("unmasked" in scores) == ("fill_in_accuracy" in scores["after"]) == bidirectional
    assert (saved.tokenizer.mask_token is not None) == OBJECTIVES[objective].hides_tokens


def test_each_text_is_read_once_per_epoch_in_another_order(tmp_path, monkeypatch):
    orders = []

    def noted(model, rows, **_):
        orders.append([tuple(rows[k]["ids"].tolist()) for k in range(len(rows))])
        raise KeyboardInterrupt

    monkeypatch.setattr(task, "train", noted)
    texts = [f"{boat} left at noon" for boat in "The ferry,A sloop,One barge,No tug,Any dinghy,My yacht".split(",")]
    settings = preset("lm", num_train_epochs=2, per_device_train_batch_size=3) | {"max_steps": -1}
    for folder in ("one", "two"):
        with pytest.raises(KeyboardInterrupt):
            task.train_lm("tiny-gpt2", texts, tmp_path / folder, objective="next", settings=settings, say=quiet)
    assert orders[0] == orders[1]
    first, second = orders[0][:6], orders[0][6:]
    assert sorted(first) == sorted(second) and len(set(first)) == 6 and first != second


def test_a_finished_run_gives_its_metrics_again_without_training(tmp_path):
    arguments = {"objective": "mlm", "settings": SETTINGS, "max_length": 32, "say": quiet}
    first = task.train_lm("tiny-gpt2", TEXTS, tmp_path / "run", **arguments)
    assert task.train_lm("tiny-gpt2", TEXTS, tmp_path / "run", resume=True, **arguments) == first
    with pytest.raises(TrainingError, match="resume"):
        task.train_lm("tiny-gpt2", TEXTS, tmp_path / "run", **arguments)
    with pytest.raises(TrainingError, match="objective was 'mlm', now 'mntp'"):
        task.train_lm("tiny-gpt2", TEXTS, tmp_path / "run", resume=True, **arguments | {"objective": "mntp"})


def test_lora_trains_adapters_only_and_saves_a_merged_model(tmp_path):
    original = labkit.load("tiny-gemma3", device="cpu")
    task.train_lm(
        "tiny-gemma3", TEXTS, tmp_path / "run", objective="mntp", settings=SETTINGS | {"learning_rate": 1e-2},
        lora=True, max_length=32, say=quiet,
    )  # fmt: skip
    saved = labkit.load(tmp_path / "run" / "model", device="cpu")
    assert type(saved.model) is type(original.model)
    old, new = original.model.state_dict(), saved.model.state_dict()
    changed = {name for name in old if old[name].shape != new[name].shape or not torch.equal(old[name], new[name])}
    assert changed and all("proj" in name or "embed_tokens" in name or "lm_head" in name for name in changed)
    rows = len(old["model.embed_tokens.weight"])
    assert torch.equal(old["model.embed_tokens.weight"], new["model.embed_tokens.weight"][:rows])


def test_lora_computes_in_float32_on_a_cpu_however_the_weights_are_stored(tmp_path):
    lm = labkit.load("tiny-gpt2", dtype="bfloat16", device="cpu")
    lm.model.save_pretrained(tmp_path / "stored")
    lm.tokenizer.save_pretrained(tmp_path / "stored")
    given = {"objective": "next", "max_length": 16, "lora": True, "settings": SETTINGS, "say": quiet}
    task.train_lm(tmp_path / "stored", TEXTS, tmp_path / "run", **given)
    saved = labkit.load(tmp_path / "run" / "model", dtype=None).model
    assert {weight.dtype for weight in saved.parameters()} == {torch.float32}


def test_dropout_is_set_in_modules_and_in_attention():
    lm = labkit.load("tiny-gemma3", device="cpu")
    task.set_dropout(lm.model, 0.25)
    assert {layer.self_attn.attention_dropout for layer in lm.model.model.layers} == {0.25}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"objective": "clm"}, "no objective is called 'clm'"),
        ({"mask_rate": 0.0}, "mask rate"),
        ({"layers": "all but one"}, "layers"),
        ({"window": "double"}, "window"),
        ({"max_length": 1}, "at least 2"),
        ({"model": "no-such-model"}, "no-such-model"),
        ({"texts": []}, "nothing to train on"),
        ({"dropout": 2.0}, "dropout"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_bad_input_is_one_error_and_leaves_no_folder(changes, message, tmp_path):
    arguments = {"model": "tiny-gpt2", "texts": TEXTS, "objective": "mlm", "settings": SETTINGS, **changes}
    with pytest.raises(LabkitError, match=message):
        task.train_lm(arguments.pop("model"), arguments.pop("texts"), tmp_path / "run", **arguments)
    assert not (tmp_path / "run").exists()


def test_a_model_with_fewer_embeddings_than_its_tokenizer_has_tokens_is_refused(tmp_path):
    lm = labkit.load("tiny-gpt2", device="cpu")
    lm.model.resize_token_embeddings(len(lm.tokenizer) - 40)
    lm.model.save_pretrained(tmp_path / "cut")
    lm.tokenizer.save_pretrained(tmp_path / "cut")
    with pytest.raises(LabkitError, match="tokens"):
        task.train_lm(tmp_path / "cut", TEXTS, tmp_path / "run", objective="next", settings=SETTINGS)


# -- generating after a prefix -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tiny-gpt2", "tiny-gemma3", "tiny-llama"])
def test_a_prompt_read_in_both_directions_is_continued_with_the_cache_as_without(name):
    lm = labkit.load(name, device="cpu")
    ids = torch.tensor([lm.tokenizer("The ferry left at noon because")["input_ids"]])
    common = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    if name == "tiny-gemma3":  # its default cache lets go of keys beyond the window, which this prefix keeps open
        common[CACHE] = DynamicCache()
    with labkit.masked(lm.model, masks.prefix(ids.size(1))):
        cached = lm.model.generate(ids, attention_mask=torch.ones_like(ids), **common)
        uncached = ids
        for _ in range(6):
            logits = lm.model(uncached, use_cache=False).logits
            uncached = torch.cat([uncached, logits[:, -1:].argmax(-1)], dim=1)
        both_ways = logits
    plain = lm.model(uncached[:, :-1], use_cache=False).logits
    assert torch.equal(cached, uncached)
    assert not torch.allclose(both_ways[:, 0], plain[:, 0], atol=1e-4)  # the prompt was really read both ways
