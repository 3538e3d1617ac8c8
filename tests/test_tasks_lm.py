"""Adapting a language model: mask tokens, filling gaps, and training runs of every objective."""

import pytest
import torch

import labkit
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
SETTINGS = preset("lm", max_steps=4, per_device_train_batch_size=4, learning_rate=1e-3)


@pytest.fixture
def bare():
    """A model whose tokenizer has no mask token."""
    return labkit.load("tiny-gpt2", device="cpu")


@pytest.fixture
def gpt2(bare):
    task.ensure_mask_token(bare.model, bare.tokenizer)
    return bare


def run(folder, model="tiny-gpt2", texts=TEXTS, **options):
    options = {"objective": "mlm", "settings": SETTINGS, "max_length": 32, "log": lambda text: None} | options
    return task.train_lm(model, texts, folder, **options)


def test_a_mask_token_is_added_where_there_is_none_and_starts_as_the_mean_embedding(bare):
    before = bare.model.get_input_embeddings().weight.detach().clone()
    new = task.ensure_mask_token(bare.model, bare.tokenizer)
    table = bare.model.get_input_embeddings().weight.detach()
    assert bare.tokenizer.mask_token_id == new == len(before)
    torch.testing.assert_close(table[:new], before, rtol=0, atol=0)
    torch.testing.assert_close(table[new], before.mean(0))
    spaced, joined = bare.tokenizer(["left <mask> noon", "left<mask> noon"])["input_ids"]
    assert spaced == joined and spaced.count(new) == 1  # the space before it belongs to it, as to a word
    assert task.ensure_mask_token(bare.model, bare.tokenizer) == new  # a second time it changes nothing
    assert torch.equal(bare.model.get_input_embeddings().weight.detach(), table)


def test_a_reserved_token_is_taken_before_one_is_added(bare):
    bare.tokenizer.add_tokens("<unused0>")
    bare.model.resize_token_embeddings(len(bare.tokenizer), mean_resizing=False)
    rows = bare.model.get_input_embeddings().num_embeddings
    assert task.ensure_mask_token(bare.model, bare.tokenizer) == bare.tokenizer.convert_tokens_to_ids("<unused0>")
    assert bare.model.get_input_embeddings().num_embeddings == rows


@pytest.mark.parametrize("reads", ["same", "before"])
def test_fill_in_reads_the_logits_at_the_position_it_says(gpt2, reads):
    text = "The ferry left at <mask> because the tide was <mask>."
    ids = torch.tensor([gpt2.tokenizer(text)["input_ids"]])
    hidden = (ids[0] == gpt2.tokenizer.mask_token_id).nonzero()[:, 0]
    with torch.no_grad():
        expected = gpt2.model(ids).logits[0, hidden - (1 if reads == "before" else 0)].softmax(-1)
    for answers, row in zip(task.fill_in(gpt2, text, reads=reads, top=3), expected, strict=True):
        best = row.topk(3)
        assert [a for a, _ in answers] == [gpt2.tokenizer.decode([i]) for i in best.indices.tolist()]
        assert [p for _, p in answers] == pytest.approx(best.values.tolist(), rel=1e-5)


@pytest.mark.parametrize("reads", ["same", "before"])
def test_fill_in_scores_agree_with_one_forward_per_hidden_token(gpt2, reads):
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
    few = [task.fill_in_scores(gpt2.model, gpt2.tokenizer, rows, reads=reads, positions=9) for _ in range(2)]
    assert few[0] == few[1] and len(few[0].ranks) == 9  # which tokens are hidden does not depend on chance


def test_rows_hold_every_token_of_every_text_in_order(bare):
    rows = task.cut_into_rows(bare.tokenizer, TEXTS[:3], 16)
    whole = [bare.tokenizer(text)["input_ids"] for text in TEXTS[:3]]
    pieces = [ids[start : start + 16] for ids in whole for start in range(0, len(ids), 16)]
    assert [row.tolist() for row in rows] == [piece for piece in pieces if len(piece) > 1]


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda lm: task.fill_in(lm, "no gap here", reads="same"), "nothing to fill in"),
        (lambda lm: task.fill_in(lm, "<mask> is first", reads="before"), "no position before"),
        (lambda lm: task.fill_in(lm, "a <mask>", reads="left"), "choose one of same, before"),
        (lambda lm: task.cut_into_rows(lm.tokenizer, ["", ""], 16), "nothing to train on"),
    ],
)
def test_bad_input_is_refused(act, message, gpt2):
    with pytest.raises(DataError, match=message):
        act(gpt2)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_each_objective_trains_and_leaves_a_model_with_the_attention_it_needs(objective, tmp_path):
    given = {"texts": TEXTS[:6], "eval_texts": TEXTS[6:], "objective": objective}
    metrics = run(tmp_path / "run", settings=SETTINGS | {"max_steps": 12}, **given)
    scores = metrics["scores"]
    assert scores["after"]["loss"] < scores["before"]["loss"]
    assert {"seconds", "tokens_per_second", "peak_memory_bytes", "seed", "n_train", "n_eval"} <= set(metrics)
    saved = labkit.load(tmp_path / "run" / "model", device="cpu")
    bidirectional = OBJECTIVES[objective].attention == "bidirectional"
    assert labkit.audit(saved.model, quick=True).verdict == ("bidirectional" if bidirectional else "causal")
    assert ("unmasked" in scores) == ("fill_in_accuracy" in scores["after"]) == bidirectional
    if bidirectional:
        rows = task.cut_into_rows(saved.tokenizer, TEXTS[6:], 32)
        reads = "same" if objective == "mlm" else "before"
        expected = task.fill_in_scores(saved.model, saved.tokenizer, rows, reads=reads).pseudo_perplexity
        assert scores["after"]["pseudo_perplexity"] == pytest.approx(expected, rel=1e-4)
    assert (saved.tokenizer.mask_token is not None) == OBJECTIVES[objective].hides_tokens
    assert run(tmp_path / "run", settings=SETTINGS | {"max_steps": 12}, resume=True, **given) == metrics  # finished
    with pytest.raises(TrainingError, match="resume"):
        run(tmp_path / "run", **given)


def test_lora_trains_adapters_only_and_saves_them_and_a_merged_float32_model(tmp_path):
    stored = labkit.load("tiny-gemma3", dtype="bfloat16", device="cpu")
    stored.model.save_pretrained(tmp_path / "stored")
    stored.tokenizer.save_pretrained(tmp_path / "stored")
    run(tmp_path / "run", tmp_path / "stored", objective="mntp", settings=SETTINGS | {"learning_rate": 1e-2}, lora=True)
    saved = labkit.load(tmp_path / "run" / "model", device="cpu", dtype=None)
    assert type(saved.model) is type(stored.model)
    assert {weight.dtype for weight in saved.model.parameters()} == {torch.float32}
    old, new = stored.model.state_dict(), saved.model.state_dict()
    changed = {name for name in old if not torch.equal(old[name].float(), new[name][: len(old[name])])}
    assert changed and all("proj" in name for name in changed)  # the mask token's embedding is new

    adapted = labkit.load(tmp_path / "run" / "adapter", device="cpu", dtype="float32")
    ids = torch.tensor([adapted.tokenizer("The ferry <mask> at noon.")["input_ids"]])
    assert adapted.tokenizer.mask_token == saved.tokenizer.mask_token
    torch.testing.assert_close(adapted.model(ids).logits, saved.model(ids).logits, atol=1e-5, rtol=0)
    headed = labkit.load(tmp_path / "run" / "adapter", task="qa", device="cpu", dtype="float32")  # a new head on it
    torch.testing.assert_close(
        headed.model.backbone(ids).last_hidden_state, saved.model.model(ids).last_hidden_state, atol=1e-5, rtol=0
    )


def test_dropout_is_set_in_modules_and_in_attention():
    gemma, gpt2 = (labkit.load(name, device="cpu").model for name in ("tiny-gemma3", "gpt2-mini"))
    for model in (gemma, gpt2):
        task.set_dropout(model, 0.25)
    assert {layer.self_attn.attention_dropout for layer in gemma.model.layers} == {0.25}
    assert {module.p for module in gpt2.modules() if isinstance(module, torch.nn.Dropout)} == {0.25}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"objective": "clm"}, "the objective is 'clm'"),
        ({"layers": "all but one"}, "layers"),
        ({"texts": []}, "nothing to train on"),
        ({"texts": ["tide " * 3000], "max_length": 2000}, "2,000 tokens, and the model has"),
    ],
)
def test_bad_input_is_one_error_and_leaves_no_folder(changes, message, tmp_path):
    with pytest.raises(LabkitError, match=message):
        run(tmp_path / "run", **changes)
    assert not (tmp_path / "run").exists()
