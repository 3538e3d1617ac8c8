"""Future Attention: what it computes, that it is causal, and what it refuses."""

import json
import math
import pickle

import pytest
import torch
from torch.nn import functional as F

from labkit import masks
from labkit.auditing.leaks import find_leaks, leak_meter
from labkit.errors import ModelError, UnsupportedModelError
from labkit.future_attention import (
    Future,
    FutureAttention,
    FutureGPT,
    FutureLoss,
    predicted,
    predicted_contribution,
    true_contribution,
    true_weights,
)
from labkit.gpt import GPT, Cache, GPTConfig
from labkit.models.tiny import build_tiny_model

CONFIG = GPTConfig(vocab_size=23, context=12, width=16, layers=2, heads=2)
FUTURES = {
    "position": Future(4), "position, all": Future(11), "tokens": Future(4, "tokens", rank=3),
    "memory": Future(5, "memory"), "one layer": Future(3, layers=(1,)), "memory, longer": Future(20, "memory"),
}  # fmt: skip


def made(name, seed=0, **changes):
    torch.manual_seed(seed)
    model = FutureGPT(GPTConfig(**{**vars(CONFIG), **changes}), FUTURES[name]).double()
    with torch.no_grad():  # GPT-2 begins with scores of about 0, which would hide a wrong mask
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=0.5)
    return model.eval()


def some_ids(rows=2, length=12, seed=1):
    return torch.randint(23, (rows, length), generator=torch.Generator().manual_seed(seed))


# -- four tokens, by hand ----------------------------------------------------------------------------------------------


def by_hand(dim=2):
    """One head of width 1: query = x, key = x ln 2, value = 10 x; the column of position p has key ln 3, value 100 p.

    So with x = 1, 0, 1, 1 the exponential of a score is 2 where both are 1, else 1; 3 or 1 for a column.
    """
    attention = FutureAttention(GPTConfig(vocab_size=2, context=4, width=1, layers=1, heads=1), Future(dim)).double()
    with torch.no_grad():
        attention.c_attn.weight.copy_(torch.tensor([[1.0], [math.log(2)], [10.0]], dtype=torch.float64))
        attention.c_attn.bias.zero_()
        attention.c_proj.weight.fill_(1.0)
        attention.c_proj.bias.zero_()
        attention.columns.key.fill_(math.log(3))
        attention.columns.value.copy_(torch.tensor([[0.0], [100.0], [200.0], [300.0]]))
    x = torch.tensor([1.0, 0.0, 1.0, 1.0], dtype=torch.float64).view(1, 4, 1)
    attention.watching = []
    return attention(x, "causal", None, None, 0).flatten(), attention.watching[0]


def test_four_tokens_by_hand():
    out, seen = by_hand()
    expected = [(2 * 10 + 3 * 100 + 3 * 200) / 8, (10 + 200 + 300) / 4, (20 + 20 + 3 * 300) / 8, 60 / 7]
    assert torch.allclose(out, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-12)
    assert torch.allclose(seen.past.flatten(), torch.tensor([20 / 8, 10 / 4, 40 / 8, 60 / 7]).double(), atol=1e-6)
    assert seen.future_weights[0, 0, 0].tolist() == pytest.approx([0, 3 / 8, 3 / 8, 0])
    assert seen.future_weights[0, 0, 3].tolist() == [0, 0, 0, 0]  # nothing comes after the last position


def test_both_definitions_of_the_target_by_hand():
    _, seen = by_hand()
    assert true_contribution(seen, "joint").flatten().tolist() == pytest.approx([20 / 5, 20 / 4, 20 / 7, 0])
    causal = [10, 10 / 2, 40 / 5, 60 / 7]
    full = [40 / 5, 30 / 4, 60 / 7, 60 / 7]
    difference = [f - c for f, c in zip(full, causal, strict=True)]
    assert true_contribution(seen, "difference").flatten().tolist() == pytest.approx(difference, abs=1e-12)
    out = (seen.past + seen.future).flatten()
    guess = [o - c for o, c in zip(out.tolist(), causal, strict=True)]
    assert predicted_contribution(seen, "difference").flatten().tolist() == pytest.approx(guess, abs=1e-12)
    assert torch.equal(predicted_contribution(seen, "joint"), seen.future)


def test_one_position_ahead_by_hand():
    out, seen = by_hand(dim=1)
    expected = [(20 + 300) / 5, (10 + 200) / 3, 940 / 8, 60 / 7]
    assert out.tolist() == pytest.approx(expected)
    assert true_contribution(seen).flatten().tolist() == pytest.approx([0, 10 / 3, 20 / 7, 0])


# -- against a second way of writing it --------------------------------------------------------------------------------


def looped(attention, x):
    """The block position by position and head by head, as one would write it down first."""
    c, heads = attention.columns, attention.heads
    query, key, value = attention.project(x)
    batch, seq, width = x.shape
    d, out = width // heads, torch.zeros_like(x)
    for b in range(batch):
        for h in range(heads):
            part = slice(h * d, (h + 1) * d)
            for i in range(seq):
                pairs = [(key[b, h, j], value[b, h, j]) for j in range(i + 1)]
                for ahead in range(1, attention.future.dim + 1):
                    if attention.future.source == "memory":
                        pairs.append((c.key[ahead - 1, part], c.value[ahead - 1, part]))
                    elif i + ahead < c.context and attention.future.source == "position":
                        pairs.append((c.key[i + ahead, part], c.value[i + ahead, part]))
                    elif i + ahead < c.context:
                        content = 1 + c.content(x[b, i])
                        k, v = (
                            c.key @ (c.key_ahead[ahead - 1] * content),
                            c.value @ (c.value_ahead[ahead - 1] * content),
                        )
                        pairs.append((k[part], v[part]))
                scores = torch.stack([query[b, h, i] @ k / math.sqrt(d) for k, _ in pairs]).softmax(0)
                out[b, i, part] = sum(w * v for w, (_, v) in zip(scores, pairs, strict=True))
    return attention.c_proj(out)


@pytest.mark.parametrize("name", ["position", "position, all", "tokens", "memory"])
@pytest.mark.parametrize("seq", [12, 7])
def test_the_block_is_what_a_loop_over_positions_gives(name, seq):
    attention = made(name).h[0].attn
    x = torch.randn(2, seq, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    assert torch.allclose(attention(x, "causal", None, None, 0), looped(attention, x), rtol=0, atol=1e-12)


def test_true_weights_are_those_of_attention_without_the_mask_for_so_many_positions():
    scores = torch.randn(1, 2, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    assert torch.allclose(true_weights(scores, 5), F.softmax(scores, dim=-1), atol=1e-12)
    near = true_weights(scores, 2)
    assert bool((near[..., 0, 3:] == 0).all()) and float(near[..., 0, :3].sum(-1).min()) == pytest.approx(1)


def test_the_squares_that_are_predicted():
    cells = predicted(2).dense(5)
    assert torch.equal(cells, torch.tensor([[0 < j - i <= 2 for j in range(5)] for i in range(5)]))
    assert not bool((cells & masks.causal().dense(5)).any())
    assert predicted(2).explain() == "predicted(2): a token may look at the next 2 after itself, and nothing else."
    assert pickle.loads(pickle.dumps(predicted(2))) == predicted(2) != predicted(3)


# -- causal, in every way that can be asked ----------------------------------------------------------------------------


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", FUTURES)
def test_the_future_changes_no_earlier_logit_by_a_bit(name, training):
    model = made(name, attention_dropout=0.0, dropout=0.0).float().train(training)
    ids = some_ids()
    plain = model(ids)
    for at in range(1, 12):
        changed = ids.clone()
        changed[:, at:] = (changed[:, at:] + 5) % 23
        assert torch.equal(model(changed)[:, :at], plain[:, :at]), at
        assert not torch.equal(model(changed)[:, at:], plain[:, at:])


@pytest.mark.parametrize("name", FUTURES)
def test_the_leak_detector_finds_nothing(name):
    report = find_leaks(made(name, context=16).float())
    assert report.clean, str(report)


@pytest.mark.parametrize("name", FUTURES)
def test_how_long_the_text_is_tells_a_position_nothing(name):
    model, ids = made(name), some_ids()
    assert torch.allclose(model(ids[:, :5]), model(ids)[:, :5], rtol=0, atol=1e-11)


@pytest.mark.parametrize("name", FUTURES)
def test_generation_with_the_cache_is_generation_without(name):
    model, ids = made(name), some_ids(length=4)
    assert torch.equal(model.generate(ids, 8), model.generate(ids, 8, use_cache=False))
    cache, whole = Cache(), model(some_ids())
    parts = [model(some_ids()[:, i : i + 3], cache=cache) for i in range(0, 12, 3)]
    assert torch.allclose(torch.cat(parts, dim=1), whole, rtol=0, atol=1e-11)


@pytest.mark.end_to_end
@pytest.mark.parametrize("source", ["position", "tokens"])
def test_trained_on_random_tokens_it_stays_above_what_can_be_known(source):
    """Also while the target, which is made of the future, is trained on."""

    def factory(seed):
        return FutureGPT(GPTConfig(vocab_size=8, context=16, width=16, layers=1, heads=1), Future(8, source, rank=4))

    meter = leak_meter(factory, 8, seeds=(0, 1), steps=40, batch_size=8, length=16)
    assert meter.clean, str(meter)
    torch.manual_seed(0)
    model, objective, floor = factory(0), FutureLoss("cosine"), math.log(8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(40):
        ids = torch.randint(8, (16, 16))
        with model.watched() as seen:
            loss = model.loss(ids[:, :-1], ids[:, 1:]) + objective(seen)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    ids = torch.randint(8, (256, 16))
    assert model.eval().loss(ids[:, :-1], ids[:, 1:]).item() > floor - 14 / (256 * 15)


# -- weights: counted, started, saved ----------------------------------------------------------------------------------


def test_parameters_are_counted():
    assert made("position").column_parameters == 2 * 2 * 12 * 16
    assert made("memory").column_parameters == 2 * 2 * 5 * 16
    assert made("tokens").column_parameters == 2 * (3 * 16 * 3 + 2 * 4 * 3)
    assert made("one layer").column_parameters == 2 * 12 * 16
    plain = sum(p.numel() for p in GPT(CONFIG).parameters())
    for name in FUTURES:
        model = made(name)
        assert sum(p.numel() for p in model.parameters()) == plain + model.column_parameters


@pytest.mark.parametrize("name", FUTURES)
def test_all_but_the_columns_begins_as_the_plain_model_of_that_seed(name):
    torch.manual_seed(5)
    plain = GPT(CONFIG).state_dict()
    torch.manual_seed(5)
    model = FutureGPT(CONFIG, FUTURES[name])
    for key, weight in model.state_dict().items():
        assert ".columns." in key or torch.equal(weight, plain[key]), key
    columns = [p for key, p in model.named_parameters() if ".columns." in key]
    assert columns and all(bool((p != 0).all()) for p in columns)


@pytest.mark.parametrize("name", ["position", "tokens", "memory"])
def test_every_parameter_of_the_columns_learns_from_the_next_token_alone(name):
    model, ids = made(name), some_ids()
    model.loss(ids[:, :-1], ids[:, 1:]).backward()
    unused = {f"h.{layer}.attn.columns.{part}" for layer in (0, 1) for part in ("key", "value")}
    for key, parameter in model.named_parameters():
        if ".columns." in key:
            rows = parameter.grad.abs().flatten(1).sum(1)
            first = 1 if name == "position" and key in unused else 0  # no position has the first one ahead of it
            assert bool((rows[first:] > 0).all()), key


def test_the_weights_of_transformers_gpt2_are_a_start():
    source = build_tiny_model("tiny-gpt2", attn="sdpa")
    model = FutureGPT.from_gpt(source, Future(6))
    plain, weights = GPT.from_transformers(source).state_dict(), model.state_dict()
    assert all(torch.equal(weights[name], weight) for name, weight in plain.items())
    assert model.training == source.training and model.future == Future(6)
    again = FutureGPT.from_transformers(source, future=Future(6))
    assert again.column_parameters == model.column_parameters


@pytest.mark.parametrize("name", FUTURES)
def test_what_is_saved_is_what_is_loaded(name, tmp_path):
    model = made(name)
    again = FutureGPT.load(model.save(tmp_path / "m"))
    assert again.future == model.future and again.config == model.config and not again.training
    assert torch.equal(again(some_ids()), model(some_ids()))
    assert sorted(each.name for each in (tmp_path / "m").iterdir()) == ["config.json", "model.safetensors"]


def test_weights_that_do_not_fit_are_refused(tmp_path):
    folder = made("position").save(tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    config["future"]["source"] = "memory"
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="holds no Future Attention model that can be read"):
        FutureGPT.load(folder)
    (folder / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(ModelError, match="holds no Future Attention model"):
        FutureGPT.load(folder)
    with pytest.raises(ModelError, match="holds no Future Attention model"):
        FutureGPT.load(tmp_path / "nowhere")


# -- watching ----------------------------------------------------------------------------------------------------------


def test_what_is_seen_is_what_goes_on_and_the_last_pass_alone():
    model, ids = made("position"), some_ids()
    plain = model(ids)
    with model.watched() as seen:
        assert seen == []
        model(ids[:, :3])
        assert torch.equal(model(ids), plain)
        assert len(seen) == 2 and seen[0].query.shape == (2, 2, 12, 8)
    for each in seen:
        total = each.past_weights.sum(-1) + each.future_weights.sum(-1)
        assert torch.allclose(total, torch.ones_like(total)) and each.causal.shape == each.past.shape
    model(ids)
    assert len(seen) == 2  # nothing is added when nobody watches
    with made("one layer").watched() as one:
        pass
    assert one == []


@pytest.mark.parametrize("name", ["position", "tokens", "memory"])
def test_attention_dropout_falls_on_past_and_columns(name):
    model, ids = made(name, attention_dropout=0.5).train(), some_ids()
    with model.watched() as seen:
        torch.manual_seed(0)
        first = model(ids)
        torch.manual_seed(1)
        assert not torch.equal(model(ids), first)
    assert len(seen) == 2
    assert torch.equal(model.eval()(ids), model(ids))


# -- one clear error ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dim": 0}, "from 1"), ({"dim": -3}, "from 1"), ({"dim": 12}, "at most 11 others"),
        ({"dim": 99, "source": "tokens"}, "at most 11"), ({"source": "memories"}, "there are position, tokens, memory"),
        ({"source": "tokens", "rank": 0}, "rank 0"), ({"layers": (2,)}, "some of 0 to 1"),
        ({"layers": ()}, "at least one"), ({"layers": (1, 1)}, "none twice"), ({"layers": (-1,)}, "some of 0 to 1"),
    ],
)  # fmt: skip
def test_columns_that_cannot_be_are_refused(change, message):
    with pytest.raises(ModelError, match=message):
        FutureGPT(CONFIG, Future(**{"dim": 3} | change))


def test_what_it_cannot_do_it_says():
    model = made("position")
    with pytest.raises(ModelError, match="causal by definition"):
        model(some_ids(), masks.bidirectional())
    with pytest.raises(ModelError, match="use `with model.watched"):
        model.attentions(some_ids())
    with pytest.raises(ModelError, match="no future columns"):
        model.to_transformers()
    with pytest.raises(ModelError, match="has columns already"):
        FutureGPT.from_gpt(model)
    with pytest.raises(UnsupportedModelError, match="reads the weights of a GPT-2"):
        FutureGPT.from_gpt(build_tiny_model("tiny-llama", attn="sdpa"))
