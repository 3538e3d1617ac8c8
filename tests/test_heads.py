"""The heads: every family and task, padded and not, saved and loaded, causal and bidirectional."""

import pytest
import torch
from torch.testing import assert_close

import labkit
from labkit.convert import conversion_of
from labkit.errors import HeadError
from labkit.models.heads import TASKS, Head, head_in, set_backbone_dropout
from labkit.models.pooling import POOLINGS, make_pooling
from labkit.models.tiny import TINY_NAMES

LABELS = ("O", "B-PER", "I-PER")


def head_for(task, **others):
    return Head(task, labels=LABELS if task.endswith("classification") else (), **others)


def load(name, task, **others):
    torch.manual_seed(0)
    return labkit.load(name, task=head_for(task, **others), device="cpu").model


def batch(model, lengths=(5, 7), pad=0, side="right"):
    """Rows of these lengths, padded on one side, and the mask that says which tokens are real."""
    torch.manual_seed(1)
    vocab, longest = model.get_input_embeddings().num_embeddings, max(lengths)
    ids, mask = torch.full((len(lengths), longest), pad), torch.zeros(len(lengths), longest, dtype=torch.long)
    for row, n in enumerate(lengths):
        where = slice(0, n) if side == "right" else slice(longest - n, longest)
        ids[row, where] = torch.randint(3, vocab, (n,))
        mask[row, where] = 1
    return ids, mask


def numbers(output):
    """What the head says, as one tensor (batch, ...)."""
    if "start_logits" in output:
        return torch.stack([output.start_logits, output.end_logits], -1)
    return output["logits"] if "logits" in output else output.pooler_output


# ------------------------------------------------------------------------------------------------- every family
@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("name", TINY_NAMES)
def test_every_family_has_every_head_and_a_saved_folder_brings_it_back(name, task, tmp_path):
    from transformers import AutoModel

    lm = labkit.load(name, task=head_for(task, pooling="attention_query", backbone_dropout=0.1), device="cpu")
    ids, mask = batch(lm.model)
    with torch.no_grad():
        before = numbers(lm.model(ids, attention_mask=mask))
    lm.model.save_pretrained(tmp_path / "m")
    lm.tokenizer.save_pretrained(tmp_path / "m")
    again = labkit.load(tmp_path / "m", device="cpu")
    assert type(again.model) is type(lm.model) and head_in(again.model.config) == lm.model.head_settings
    assert "untrained" not in again.source
    with torch.no_grad():
        assert torch.equal(numbers(again.model(ids, attention_mask=mask)), before)
    if task.endswith("classification"):
        assert again.model.config.id2label == dict(enumerate(LABELS)) and before.shape[-1] == 3
    bare = AutoModel.from_pretrained(tmp_path / "m", attn_implementation=again.model.config._attn_implementation)
    with torch.no_grad():
        states = bare.eval()(ids, attention_mask=mask).last_hidden_state
        ours = again.model.backbone(ids, attention_mask=mask).last_hidden_state
    assert torch.equal(states, ours)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("attention", ["causal", "bidirectional"])
def test_a_row_says_the_same_alone_and_padded(task, attention):
    model = load("tiny-gemma3", task, pooling="mean").double()
    if attention == "bidirectional":
        labkit.to_bidirectional(model)
    ids, mask = batch(model)
    with torch.no_grad():
        together = numbers(model(ids, attention_mask=mask))
        alone = numbers(model(ids[:1, :5], attention_mask=mask[:1, :5]))
    # Gemma's norms compute in float32 whatever the weights are in; a token of padding that is seen tells 1e-3 and more
    assert_close(together[:1, :5] if alone.dim() == 3 else together[:1], alone, atol=1e-6, rtol=0)


def test_a_converted_model_with_a_head_stays_converted_in_its_folder(tmp_path):
    lm = labkit.load("tiny-gemma3", task=head_for("token-classification"), device="cpu")
    labkit.to_bidirectional(lm.model, layers=[1])
    lm.model.save_pretrained(tmp_path / "m")
    lm.tokenizer.save_pretrained(tmp_path / "m")
    again = labkit.load(tmp_path / "m", device="cpu").model
    assert conversion_of(again) == conversion_of(lm.model) != {}
    report = labkit.audit(again)
    assert [layer.verdict for layer in report.layers] == ["causal", "bidirectional"]


def test_a_folder_opened_for_another_task_gets_a_new_head_and_says_so(tmp_path):
    lm = labkit.load("tiny-gpt2", task=head_for("token-classification"), device="cpu")
    lm.model.save_pretrained(tmp_path / "m")
    lm.tokenizer.save_pretrained(tmp_path / "m")
    other = labkit.load(tmp_path / "m", task="question-answering", device="cpu")
    assert "its head is new and untrained" in other.source and other.model.head.out_features == 2
    same_size = labkit.load(tmp_path / "m", task=Head("token-classification", labels=("O", "B-X", "I-X")), device="cpu")
    assert "untrained" in same_size.source and not torch.equal(same_size.model.head.weight, lm.model.head.weight)
    assert not hasattr(labkit.load(tmp_path / "m", task="base", device="cpu").model, "head")


# ------------------------------------------------------------------------------------------------------- losses
def test_the_span_loss_is_the_mean_of_both_cross_entropies_and_padding_cannot_be_chosen():
    model = load("tiny-gpt2", "question-answering")
    ids, mask = batch(model)
    start, end = torch.tensor([1, 2]), torch.tensor([3, 6])
    output = model(ids, attention_mask=mask, start_positions=start, end_positions=end)
    by_hand = [
        -logits[row, : n].log_softmax(-1)[place[row]]
        for logits, place in ((output.start_logits, start), (output.end_logits, end))
        for row, n in enumerate((5, 7))
    ]  # fmt: skip
    assert_close(output.loss, sum(by_hand) / 4)
    assert output.start_logits.softmax(-1)[0, 5:].eq(0).all()


def test_tokens_of_minus_100_do_not_count():
    model = load("tiny-llama", "token-classification")
    ids, mask = batch(model, (4,))
    some = model(ids, attention_mask=mask, labels=torch.tensor([[-100, 2, -100, -100]])).loss
    assert_close(some, -model(ids, attention_mask=mask).logits[0, 1].log_softmax(-1)[2])


def test_the_last_token_is_found_though_pad_and_end_of_text_are_one():
    model = load("tiny-gpt2", "sequence-classification")
    ids, mask = batch(model, (4, 6), pad=1)
    ids[0, 3] = 1  # a real end-of-text token
    with torch.no_grad():
        together, alone = model(ids, attention_mask=mask).logits[:1], model(ids[:1, :4]).logits
    assert_close(together, alone)


# ------------------------------------------------------------------------------------------------------ pooling
@pytest.mark.parametrize("side", ["right", "left"])
def test_plain_poolings_against_sums_by_hand(side):
    states = torch.arange(24.0).view(2, 4, 3)
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]]) if side == "right" else torch.tensor([[0, 1, 1, 1], [1] * 4])
    rows = [states[0, mask[0] == 1], states[1]]
    expected = {
        "first": [r[0] for r in rows],
        "last": [r[-1] for r in rows],
        "mean": [r.mean(0) for r in rows],
        "weighted_mean": [(rows[0] * torch.tensor([[1.0], [2], [3]])).sum(0) / 6,
                          (rows[1] * torch.tensor([[1.0], [2], [3], [4]])).sum(0) / 10],
    }  # fmt: skip
    for name, wanted in expected.items():
        assert_close(make_pooling(name, 3)(states, mask), torch.stack(wanted))


@pytest.mark.parametrize("name", POOLINGS)
def test_no_pooling_sees_the_padding(name):
    torch.manual_seed(0)
    pool = make_pooling(name, 8, heads=2)
    if hasattr(pool, "probe"):
        torch.nn.init.normal_(pool.probe)
    states, mask = torch.randn(2, 5, 8), torch.tensor([[1, 1, 1, 0, 0], [1] * 5])
    other = torch.where(mask[..., None] == 1, states, 1e4 * torch.randn(2, 5, 8))
    assert_close(pool(states, mask), pool(other, mask))
    assert_close(pool(states[:1, :3], mask[:1, :3]), pool(states, mask)[:1])


def test_weighted_mean_of_a_long_row_survives_half_precision():
    states = torch.ones(1, 2000, 2, dtype=torch.float16)
    assert_close(make_pooling("weighted_mean", 2)(states, torch.ones(1, 2000, dtype=torch.long)), states[:, 0])


@pytest.mark.parametrize("name", ["attention_query", "attention_kv"])
def test_attention_poolings_learn_from_every_part(name):
    model = load("tiny-gemma", "embedding", pooling=name, pooling_heads=4, normalize=False)
    ids, mask = batch(model)
    model(ids, attention_mask=mask).pooler_output.pow(2).sum().backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in model.pooling.parameters())


def test_embeddings_have_length_one_unless_asked_otherwise():
    ids, mask = batch(load("tiny-gpt2", "embedding"))
    lengths = {
        wish: load("tiny-gpt2", "embedding", normalize=wish)(ids, attention_mask=mask).pooler_output.norm(dim=-1)
        for wish in (True, False)
    }
    assert_close(lengths[True], torch.ones(2))
    assert (lengths[False] - 1).abs().min() > 1e-3


# ----------------------------------------------------------------------------------------- dropout and the start
@pytest.mark.parametrize("name", TINY_NAMES)
def test_dropout_is_added_where_the_family_has_none_and_acts_in_training_only(name):
    plain, dropped = load(name, "token-classification", dropout=0.0), load(name, "token-classification", dropout=0.0)
    set_backbone_dropout(dropped, 0.5)
    set_backbone_dropout(dropped, 0.3)  # replaced, not added twice
    ids, mask = batch(plain)
    assert torch.equal(plain(ids, attention_mask=mask).logits, dropped(ids, attention_mask=mask).logits)
    set_backbone_dropout(plain, 0.0)
    for model in (plain, dropped):
        model.train()
    for module in (m for model in (plain, dropped) for m in model.backbone.modules()):  # leave only what is tested
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.0
    if name == "tiny-gpt2":
        for model in (plain, dropped):
            model.backbone.drop.p = 0.0
            for block in model.backbone.h:
                block.attn.attn_dropout.p = 0.0
    twice = [[model(ids, attention_mask=mask).logits for _ in range(2)] for model in (plain, dropped)]
    assert torch.equal(*twice[0]) and not torch.allclose(*twice[1])


def test_the_head_starts_as_asked():
    started = {
        init: load("tiny-gpt2", "token-classification", init=init).head for init in ("normal", "zeros", "xavier")
    }
    assert started["zeros"].weight.eq(0).all()
    assert 0.01 < started["xavier"].weight.abs().max() <= (6 / (64 + 3)) ** 0.5
    spread = load("tiny-gpt2", "token-classification").config.initializer_range
    assert 0.5 * spread < started["normal"].weight.std() < 1.5 * spread
    assert all(head.bias.eq(0).all() for head in started.values())


def test_lora_trains_the_adapters_and_the_head():
    from peft import LoraConfig, get_peft_model

    model = load("tiny-gemma3", "token-classification")
    wrapped = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["head"]))
    ids, mask = batch(model)
    wrapped(ids, attention_mask=mask, labels=ids % 3).loss.backward()
    moved = {name.split(".default")[0] for name, p in wrapped.named_parameters() if p.grad is not None}
    assert any("lora" in name for name in moved) and any("head" in name for name in moved)


# ---------------------------------------------------------------------------------------------------- bad input
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"task": "poetry"}, "task is 'poetry'.*token-classification"),
        ({"task": "token-classification", "labels": ("O",)}, "at least two, each once"),
        ({"task": "token-classification", "labels": ("O", "O")}, "at least two, each once"),
        ({"task": "question-answering", "labels": ("a", "b")}, "question-answering has no labels"),
        ({"task": "embedding", "pooling": "max"}, "pooling is 'max'.*weighted_mean"),
        ({"task": "embedding", "init": "ones"}, "init is 'ones'"),
        ({"task": "embedding", "dropout": 1.0}, r"dropout is a share in \[0, 1\), not 1.0"),
        ({"task": "embedding", "backbone_dropout": -0.1}, "backbone dropout is a share"),
    ],
)
def test_a_head_without_a_meaning_is_refused(wrong, message):
    with pytest.raises(HeadError, match=message):
        Head(**wrong)


def test_heads_of_the_pooling_must_divide_the_width():
    with pytest.raises(HeadError, match="5 pooling heads do not divide the width 64"):
        load("tiny-gpt2", "embedding", pooling="attention_kv", pooling_heads=5)


@pytest.mark.parametrize("name", ["attention_query", "attention_kv"])
def test_an_attention_pooling_made_alone_has_probes_that_are_numbers(name):
    for seed in range(5):
        torch.manual_seed(seed)
        probe = make_pooling(name, 64).probe
        assert bool(probe.isfinite().all()) and 0.5 < float(probe.std()) < 2.0
