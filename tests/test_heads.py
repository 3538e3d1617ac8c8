"""The heads: every family and task, padded and not, saved and loaded, causal and bidirectional."""

import pytest
import torch
from torch.testing import assert_close
from transformers import AutoModel

import labkit
from labkit.convert import conversion_of
from labkit.errors import ModelError
from labkit.models.heads import POOLINGS, TASKS, Head, Pooling, head_in
from labkit.models.tiny import TINY_NAMES

LABELS = ("O", "B-PER", "I-PER")
MASK = torch.tensor([[1, 1, 1, 0, 0], [1] * 5])


def head_for(task, **others):
    return Head(task, labels=LABELS if task.endswith("classification") else (), **others)


def load(name, task, **others):
    torch.manual_seed(0)
    return labkit.load(name, task=head_for(task, **others), device="cpu").model


def saved(lm, folder):
    lm.model.save_pretrained(folder)
    lm.tokenizer.save_pretrained(folder)
    return folder


def batch(model, lengths=(5, 7), pad=0):
    """Rows of these lengths, padded on the right, and the mask of real tokens; both (batch, longest)."""
    torch.manual_seed(1)
    vocabulary = model.get_input_embeddings().num_embeddings
    ids, mask = torch.full((len(lengths), max(lengths)), pad), torch.zeros(len(lengths), max(lengths)).long()
    for row, n in enumerate(lengths):
        ids[row, :n], mask[row, :n] = torch.randint(3, vocabulary, (n,)), 1
    return ids, mask


def numbers(output):
    """The output of the head as one tensor (batch, ...)."""
    if "start_logits" in output:
        return torch.stack([output.start_logits, output.end_logits], -1)
    return output["logits"] if "logits" in output else output.pooler_output


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("name", TINY_NAMES)
def test_every_family_has_every_head_and_a_saved_folder_restores_it(name, task, tmp_path):
    lm = labkit.load(name, task=head_for(task, pooling="attention_query", backbone_dropout=0.1), device="cpu")
    ids, mask = batch(lm.model)
    again = labkit.load(saved(lm, tmp_path / "m"), device="cpu")
    assert type(again.model) is type(lm.model) and head_in(again.model.config) == head_in(lm.model.config)
    assert "untrained" not in again.source
    backbone = AutoModel.from_pretrained(tmp_path / "m", attn_implementation=again.model.config._attn_implementation)
    with torch.no_grad():
        before, after = (numbers(model(ids, attention_mask=mask)) for model in (lm.model, again.model))
        ours, theirs = (
            model(ids, attention_mask=mask).last_hidden_state for model in (again.model.backbone, backbone.eval())
        )
    assert torch.equal(before, after) and torch.equal(ours, theirs)
    if task.endswith("classification"):
        assert again.model.config.id2label == dict(enumerate(LABELS)) and before.shape[-1] == 3
    if task == "embedding":
        assert_close(before.norm(dim=-1), torch.ones(2))


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("attention", ["causal", "bidirectional"])
def test_a_row_has_the_same_output_alone_and_padded(task, attention):
    model = load("tiny-gemma3", task, pooling="mean").double()
    if attention == "bidirectional":
        labkit.to_bidirectional(model)
    ids, mask = batch(model)
    with torch.no_grad():
        together = numbers(model(ids, attention_mask=mask))
        alone = numbers(model(ids[:1, :5], attention_mask=mask[:1, :5]))
    # Gemma's norms compute in float32 in any dtype; attention to a token of padding changes the output by 1e-3 or more
    assert_close(together[:1, :5] if alone.dim() == 3 else together[:1], alone, atol=1e-6, rtol=0)


def test_a_folder_keeps_its_conversion_and_gets_a_new_head_for_another_task(tmp_path):
    lm = labkit.load("tiny-gemma3", task=head_for("token-classification"), device="cpu")
    labkit.to_bidirectional(lm.model, layers=[1])
    folder = saved(lm, tmp_path / "m")
    again = labkit.load(folder, device="cpu").model
    assert conversion_of(again) == conversion_of(lm.model) != {}
    assert [layer.verdict for layer in labkit.audit(again).layers] == ["causal", "bidirectional"]
    other = labkit.load(folder, task="question-answering", device="cpu")
    assert "its head is new and untrained" in other.source and other.model.head.out_features == 2
    same_size = labkit.load(folder, task=Head("token-classification", labels=("O", "B-X", "I-X")), device="cpu")
    assert "untrained" in same_size.source and not torch.equal(same_size.model.head.weight, lm.model.head.weight)


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


def test_labels_of_minus_100_do_not_count_and_the_last_token_is_pooled_also_if_it_has_the_id_of_the_pad():
    model = load("tiny-llama", "token-classification")
    ids, mask = batch(model, (4,))
    loss = model(ids, attention_mask=mask, labels=torch.tensor([[-100, 2, -100, -100]])).loss
    assert_close(loss, -model(ids, attention_mask=mask).logits[0, 1].log_softmax(-1)[2])
    model = load("tiny-gpt2", "sequence-classification")
    ids, mask = batch(model, (4, 6), pad=1)
    ids[0, 3] = 1  # a real end-of-text token
    with torch.no_grad():
        assert_close(model(ids, attention_mask=mask).logits[:1], model(ids[:1, :4]).logits)


@pytest.mark.parametrize("side", ["right", "left"])
def test_plain_poolings_equal_sums_by_hand(side):
    states = torch.arange(30.0).view(2, 5, 3)
    mask = MASK if side == "right" else MASK.flip(1)
    rows = [states[0, mask[0] == 1], states[1]]
    ranks = [torch.arange(1.0, len(row) + 1)[:, None] for row in rows]
    expected = {
        "first": [row[0] for row in rows],
        "last": [row[-1] for row in rows],
        "mean": [row.mean(0) for row in rows],
        "weighted_mean": [(row * rank).sum(0) / rank.sum() for row, rank in zip(rows, ranks, strict=True)],
    }
    for name, vectors in expected.items():
        assert_close(Pooling(name, 3)(states, mask), torch.stack(vectors))
    long = torch.ones(1, 2000, 2, dtype=torch.float16)  # the sum of positions exceeds float16
    assert_close(Pooling("weighted_mean", 2)(long, torch.ones(1, 2000, dtype=torch.long)), long[:, 0])


@pytest.mark.parametrize("name", POOLINGS)
def test_no_pooling_depends_on_the_padding(name):
    torch.manual_seed(0)
    pool, states = Pooling(name, 8), torch.randn(2, 5, 8)
    other = torch.where(MASK[..., None] == 1, states, 1e4 * torch.randn(2, 5, 8))
    assert_close(pool(states, MASK), pool(other, MASK))
    assert_close(pool(states[:1, :3], MASK[:1, :3]), pool(states, MASK)[:1])


@pytest.mark.parametrize(("name", "probes"), [("attention_query", 1), ("attention_kv", 64)])
def test_attention_poolings_equal_torchs_attention_and_learn_in_every_part(name, probes):
    torch.manual_seed(0)
    pool, oracle = Pooling(name, 8), torch.nn.MultiheadAttention(8, 1, bias=False, batch_first=True)
    states, probe = torch.randn(2, 5, 8), pool.probe.expand(2, probes, 8)
    with torch.no_grad():
        oracle.in_proj_weight.copy_(torch.cat([pool.query.weight, pool.key.weight, pool.value.weight]))
        oracle.out_proj.weight.copy_(pool.out.weight)
    if name == "attention_query":
        expected = oracle(probe, states, states, key_padding_mask=MASK == 0)[0][:, 0]
    else:
        expected = Pooling("mean", 8)(oracle(states, probe, probe)[0], MASK)
    assert_close(pool(states, MASK), expected)

    model = load("tiny-gemma", "embedding", pooling=name)
    ids, mask = batch(model)
    model(ids, attention_mask=mask).pooler_output[:, 0].sum().backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in model.pooling.parameters())


@pytest.mark.parametrize("name", TINY_NAMES)
def test_backbone_dropout_acts_in_training_only(name):
    model, plain = (load(name, "token-classification", dropout=0.0, backbone_dropout=p) for p in (0.5, 0.0))
    ids, mask = batch(model)
    expected = plain(ids, attention_mask=mask).logits
    assert torch.equal(model(ids, attention_mask=mask).logits, expected)
    assert torch.equal(plain.train()(ids, attention_mask=mask).logits, expected)
    model.train()
    assert not torch.allclose(*(model(ids, attention_mask=mask).logits for _ in range(2)))


def test_the_head_is_initialised_as_asked():
    heads = {init: load("tiny-gpt2", "token-classification", init=init) for init in ("normal", "zeros", "xavier")}
    assert heads["zeros"].head.weight.eq(0).all()
    assert 0.01 < heads["xavier"].head.weight.abs().max() <= (6 / (64 + 3)) ** 0.5
    assert 0.5 < heads["normal"].head.weight.std() / heads["normal"].config.initializer_range < 1.5
    assert all(model.head.bias.eq(0).all() for model in heads.values())


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"task": "poetry"}, "task is 'poetry'.*token-classification"),
        ({"task": "token-classification", "labels": ("O", "O")}, "at least two, each once"),
        ({"task": "question-answering", "labels": ("a", "b")}, "question-answering has no labels"),
        ({"task": "embedding", "pooling": "max"}, "pooling is 'max'.*weighted_mean"),
        ({"task": "embedding", "dropout": 1.0}, r"give shares in \[0, 1\)"),
    ],
)
def test_a_meaningless_head_is_refused(wrong, message):
    with pytest.raises(ModelError, match=message):
        labkit.load("tiny-gpt2", task=Head(**wrong))
