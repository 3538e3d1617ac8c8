"""Future Attention: what it computes, that it is causal, its losses, and what it refuses."""

import math
import pickle
from dataclasses import replace

import pytest
import torch
from transformers import DynamicCache

from labkit import masks
from labkit.errors import LabkitError
from labkit.future_attention import (
    LOSSES,
    Future,
    FutureGPT,
    FutureLoss,
    Seen,
    cosine,
    infonce,
    predicted,
    predicted_contribution,
    true_contribution,
)
from labkit.gpt import GPT, GPTConfig
from labkit.models.tiny import build_tiny_model

CONFIG = GPTConfig(vocab_size=23, context=12, width=16, layers=2, heads=2)
FUTURES = {
    "position": Future(4), "position, all": Future(11), "tokens": Future(4, "tokens"),
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


KINDS = [
    (kind, target) for kind in LOSSES for target in ("joint", "difference") if (kind, target) != ("kl", "difference")
]


def seen_in(name="position", length=12, rows=3, model=None):
    model = model or made(name)
    with model.watched() as seen:
        model(some_ids(rows, length))
    return list(seen)


def leaves(seen: Seen) -> tuple[Seen, dict[str, torch.Tensor]]:
    """The same with every tensor a leaf of its own, so that gradients show which of them a loss reaches."""
    names = ("query", "key", "value", "past", "future", "past_weights", "future_weights")
    tensors = {name: getattr(seen, name).detach().clone().requires_grad_() for name in names}
    return replace(seen, **tensors), tensors


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


@pytest.mark.parametrize("name", ["position", "tokens", "memory"])
@pytest.mark.parametrize("seq", [12, 7])
def test_the_block_is_what_a_loop_over_positions_gives(name, seq):
    attention = made(name).h[0].attn
    x = torch.randn(2, seq, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    assert torch.allclose(attention(x, "causal", None, None, 0), looped(attention, x), rtol=0, atol=1e-12)


def test_the_squares_that_are_predicted():
    cells = predicted(2).dense(5)
    assert torch.equal(cells, torch.tensor([[0 < j - i <= 2 for j in range(5)] for i in range(5)]))
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
def test_generation_with_the_cache_is_generation_without(name):
    model, ids = made(name), some_ids(length=4)
    assert torch.equal(model.generate(ids, 8), model.generate(ids, 8, use_cache=False))
    cache, whole = DynamicCache(), model(some_ids())
    assert torch.allclose(model(some_ids()[:, :5]), whole[:, :5], rtol=0, atol=1e-11)  # whatever the length of the text
    parts = [model(some_ids()[:, i : i + 3], cache=cache) for i in range(0, 12, 3)]
    assert torch.allclose(torch.cat(parts, dim=1), whole, rtol=0, atol=1e-11)


# -- weights: counted, started, saved ----------------------------------------------------------------------------------


def test_parameters_are_counted():
    counts = {"position": 2 * 2 * 12 * 16, "memory": 2 * 2 * 5 * 16, "tokens": 2 * (3 * 16 * 16 + 2 * 4 * 16)}
    plain = sum(p.numel() for p in GPT(CONFIG).parameters())
    for name, count in (counts | {"one layer": 2 * 12 * 16}).items():
        model = made(name)
        assert count == sum(p.numel() for p in model.parameters()) - plain


def test_the_weights_of_transformers_gpt2_are_a_start():
    source = build_tiny_model("tiny-gpt2", attn="sdpa")
    model = FutureGPT.from_gpt(source, Future(6))
    plain, weights = GPT.from_transformers(source).state_dict(), model.state_dict()
    assert all(torch.equal(weights[name], weight) for name, weight in plain.items())
    assert model.training == source.training and model.future == Future(6)
    assert FutureGPT.from_transformers(source, future=Future(6)).state_dict().keys() == weights.keys()


# -- watching ----------------------------------------------------------------------------------------------------------


def test_what_is_seen_is_what_goes_on_and_the_last_pass_alone():
    model, ids = made("position"), some_ids()
    plain = model(ids)
    with model.watched() as seen:
        assert seen == []
        model(ids[:, :3])
        assert torch.equal(model(ids), plain)
        assert len(seen) == 2 and seen[0].query.shape == (2, 2, 12, 8)
    for layer in seen:
        total = layer.past_weights.sum(-1) + layer.future_weights.sum(-1)
        assert torch.allclose(total, torch.ones_like(total))
        assert torch.allclose(layer.past, layer.past_weights @ layer.value, atol=1e-12)
        assert bool((layer.future_weights[:, :, -1] == 0).all())  # nothing comes after the last position
    model(ids)
    assert len(seen) == 2  # nothing is added when nobody watches
    with made("one layer").watched() as one:
        pass
    assert one == []


# -- what flows where --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize(("kind", "target"), KINDS)
@pytest.mark.parametrize("source", ["position", "tokens"])
def test_no_gradient_flows_into_the_target(source, kind, target, shuffled):
    """It is made of queries, keys and values: they get none, and what was predicted does."""
    layer, tensors = leaves(seen_in(source)[0])
    FutureLoss(kind, target, shuffled=shuffled)([layer]).backward()
    reached = {name for name, leaf in tensors.items() if leaf.grad is not None and bool((leaf.grad != 0).any())}
    expected = {
        ("kl", "joint"): {"past_weights", "future_weights"},
        ("difference",): {"past", "future", "past_weights"},
        ("joint",): {"future"},
    }
    assert reached == expected.get((kind, target), expected.get((target,)))
    assert not true_contribution(layer, target).requires_grad


@pytest.mark.end_to_end
@pytest.mark.parametrize("kind", ["cosine", "infonce"])
def test_training_on_the_loss_alone_makes_the_prediction_better(kind):
    """And more than the same training on the future of another text does."""
    losses = {}
    for shuffled in (False, True):
        model = made("tokens")
        objective, fair = FutureLoss(kind, shuffled=shuffled), FutureLoss(kind)
        columns = [p for name, p in model.named_parameters() if ".columns." in name]
        optimizer, losses[shuffled] = torch.optim.Adam(columns, lr=0.02), []
        for _ in range(60):
            with model.watched() as seen:
                model(some_ids(3))
            losses[shuffled].append(float(fair(seen).detach()))
            optimizer.zero_grad()
            objective(seen).backward()
            optimizer.step()
    assert losses[False][-1] < 0.9 * losses[False][0]
    assert losses[False][-1] < losses[True][-1]


# -- ranges ------------------------------------------------------------------------------------------------------------


def test_the_ranges_at_their_ends():
    guess = torch.randn(2, 2, 9, 8, generator=torch.Generator().manual_seed(0))
    across = torch.stack([-guess[..., 1::2], guess[..., ::2]], dim=-1).flatten(-2)
    for truth, expected in ((3 * guess, 0), (across, 0.5), (-guess, 1)):
        assert float(cosine(guess, truth)) == pytest.approx(expected, abs=1e-6)
    same = guess[:, :, :1].expand_as(guess)
    assert float(infonce(same, guess)) >= math.log(9) - 1e-5  # the same everywhere: no better than chance
    assert float(infonce(same, same)) == pytest.approx(math.log(9))
    assert 0 < float(infonce(guess, guess)) < 0.2


def test_kl_by_hand():
    """Two positions of one head; the first gives 3/4 to itself and 1/4 ahead, and predicts a half layer."""
    states = [[1.0, 0.0], [math.log(3), 0.0], [1.0, 1.0], [1.0, 1.0], [1.0, 1.0]]  # query, key, value, past and future
    weights = [[[0.5, 0.0], [0.5, 0.5]], [[0.0, 0.5], [0.0, 0.0]]]  # of the past and ahead
    numbers = [torch.tensor(rows, dtype=torch.float64).view(1, 1, 2, -1) for rows in states + weights]
    layer = Seen(*numbers, 1, "position")
    expected = 0.75 * math.log(0.75 / 0.5) + 0.25 * math.log(0.25 / 0.5)
    assert float(FutureLoss("kl")([layer])) == pytest.approx(expected, abs=1e-7)


def test_the_last_position_has_no_future_and_is_not_counted():
    layer = seen_in()[0]
    moved = replace(layer, future=layer.future + torch.eye(12).double()[-1].view(1, 1, 12, 1) * 1e6)
    for kind in ("mse", "cosine", "infonce"):
        assert FutureLoss(kind)([moved]).item() == pytest.approx(FutureLoss(kind)([layer]).item())


def test_both_targets_differ_and_agree_with_their_definitions():
    layer = seen_in("position, all")[0]
    whole = (layer.query @ layer.key.transpose(-2, -1)).softmax(-1)
    later = torch.ones(12, 12, dtype=torch.bool).triu(1)
    assert torch.allclose(true_contribution(layer), whole.masked_fill(~later, 0) @ layer.value, atol=1e-12)
    causal = (layer.query @ layer.key.transpose(-2, -1)).masked_fill(later, -torch.inf).softmax(-1)
    difference = true_contribution(layer, "difference")
    assert torch.allclose(difference, whole @ layer.value - causal @ layer.value, atol=1e-12)
    assert not torch.allclose(difference, true_contribution(layer), atol=1e-2)
    guess = predicted_contribution(layer, "difference")
    assert torch.allclose(guess, layer.past + layer.future - causal @ layer.value, atol=1e-12)


def test_a_shuffled_target_is_that_of_another_text():
    layer = seen_in()[0]
    rolled = replace(layer, **{name: getattr(layer, name).roll(1, 0) for name in ("query", "key", "value")})
    for kind in ("mse", "cosine", "infonce"):
        plain, other = FutureLoss(kind)([rolled]), FutureLoss(kind, shuffled=True)([layer])
        assert float(plain) == pytest.approx(float(other))
        assert float(other) != pytest.approx(float(FutureLoss(kind)([layer])))


def test_the_layers_of_the_loss_are_chosen():
    seen = seen_in()
    alone = [float(FutureLoss()([layer])) for layer in seen]
    assert [float(FutureLoss(layers=(i,))(seen)) for i in (0, 1)] == alone
    assert float(FutureLoss()(seen)) == pytest.approx(sum(alone) / 2)


# -- refusals ----------------------------------------------------------------------------------------------------------


def with_cache():
    with (model := made("position")).watched() as seen:
        cache = DynamicCache()
        model(some_ids()[:, :6], cache=cache)
        model(some_ids()[:, 6:], cache=cache)
    return seen


@pytest.mark.parametrize(
    "refused",
    [
        *(lambda change=change: FutureGPT(CONFIG, Future(**{"dim": 3} | change)) for change in (
            {"dim": 0}, {"dim": 12}, {"source": "memories"}, {"layers": (2,)}, {"layers": ()},
            {"layers": (1, 1)},
        )),
        *(lambda change=change: FutureLoss(**change) for change in (
            {"kind": "l1"}, {"target": "whole"}, {"kind": "kl", "target": "difference"}, {"weight": -1.0},
            {"weight": float("nan")},
        )),
        lambda: FutureLoss()(with_cache()),
        lambda: FutureLoss()([]),
        lambda: FutureLoss(layers=(2,))(seen_in()),
        lambda: FutureLoss("kl")(seen_in("memory")),
        lambda: FutureLoss(shuffled=True)(seen_in(rows=1)),
        lambda: FutureLoss()(seen_in(length=1)),
        lambda: made("position")(some_ids(), masks.bidirectional()),
        lambda: made("position").attentions(some_ids()),
        lambda: FutureGPT.from_gpt(build_tiny_model("tiny-llama", attn="sdpa")),
    ],
)  # fmt: skip
def test_what_has_no_meaning_is_refused(refused):
    with pytest.raises(LabkitError):
        refused()
