"""The auxiliary losses of Future Attention: their ranges, their targets, and that no gradient flows into these."""

import math
from dataclasses import replace

import pytest
import torch

from labkit.errors import ModelError
from labkit.future_attention import (
    LOSSES,
    Future,
    FutureGPT,
    FutureLoss,
    Seen,
    cosine,
    infonce,
    mse,
    predicted_contribution,
    true_contribution,
    true_weights,
)
from labkit.gpt import Cache, GPTConfig

CONFIG = GPTConfig(vocab_size=23, context=12, width=16, layers=2, heads=2)
KINDS = [
    (kind, target) for kind in LOSSES for target in ("joint", "difference") if (kind, target) != ("kl", "difference")
]


def model_of(source="position", dim=4):
    torch.manual_seed(0)
    model = FutureGPT(CONFIG, Future(dim, source)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=0.5)
    return model


def some_ids(rows=3, length=12):
    return torch.randint(23, (rows, length), generator=torch.Generator().manual_seed(1))


def seen_by(source="position", dim=4, length=12):
    model = model_of(source, dim)
    with model.watched() as seen:
        model(some_ids(length=length))
    return list(seen)


def leaves(seen: Seen) -> tuple[Seen, dict[str, torch.Tensor]]:
    """The same with every tensor a leaf of its own, so that gradients show which of them a loss reaches."""
    names = ("query", "key", "value", "past", "future", "past_weights", "future_weights")
    made = {name: getattr(seen, name).detach().clone().requires_grad_() for name in names}
    return replace(seen, **made), made


# -- what flows where --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize(("kind", "target"), KINDS)
@pytest.mark.parametrize("source", ["position", "tokens"])
def test_no_gradient_flows_into_the_target(source, kind, target, shuffled):
    """It is made of queries, keys and values: they get none, and what was predicted does."""
    each, made = leaves(seen_by(source)[0])
    FutureLoss(kind, target, shuffled=shuffled)([each]).backward()
    reached = {name for name, leaf in made.items() if leaf.grad is not None and bool((leaf.grad != 0).any())}
    expected = {
        ("kl", "joint"): {"past_weights", "future_weights"},
        ("difference",): {"past", "future", "past_weights"},
        ("joint",): {"future"},
    }
    assert reached == expected.get((kind, target), expected.get((target,)))
    assert not true_contribution(each, target).requires_grad


@pytest.mark.parametrize(("kind", "target"), KINDS)
@pytest.mark.parametrize("source", ["position", "tokens"])
def test_every_loss_teaches_the_columns(source, kind, target):
    """But "kl", which knows weights alone, not the values of the last layer: no weights come after them."""
    model = model_of(source)
    with model.watched() as seen:
        model(some_ids())
    FutureLoss(kind, target)(seen).backward()
    for name, parameter in model.named_parameters():
        if ".columns." in name:
            taught = parameter.grad is not None and bool((parameter.grad != 0).any())
            assert taught is not (kind == "kl" and name.startswith("h.1") and "value" in name), name


@pytest.mark.end_to_end
@pytest.mark.parametrize("kind", ["mse", "cosine", "infonce"])
def test_training_on_the_loss_alone_makes_the_prediction_better(kind):
    """And more than the same training on the future of another text does."""
    ends = {}
    for shuffled in (False, True):
        model = model_of("tokens")
        objective, fair = FutureLoss(kind, shuffled=shuffled), FutureLoss(kind)
        columns = [p for name, p in model.named_parameters() if ".columns." in name]
        optimizer, losses = torch.optim.Adam(columns, lr=0.02), []
        for _ in range(60):
            with model.watched() as seen:
                model(some_ids())
            losses.append(float(fair(seen).detach()))
            optimizer.zero_grad()
            objective(seen).backward()
            optimizer.step()
        ends[shuffled] = (losses[0], losses[-1])
    assert ends[False][1] < 0.9 * ends[False][0]
    assert ends[False][1] < ends[True][1]


# -- ranges ------------------------------------------------------------------------------------------------------------


def test_the_ranges_at_their_ends():
    guess = torch.randn(2, 2, 9, 8, generator=torch.Generator().manual_seed(0))
    assert float(mse(guess, guess)) == 0 and float(mse(guess, guess + 2)) == pytest.approx(4)
    assert float(cosine(guess, 3 * guess)) == pytest.approx(0, abs=1e-6)
    assert float(cosine(guess, -guess)) == pytest.approx(1, abs=1e-6)
    across = torch.stack([-guess[..., 1::2], guess[..., ::2]], dim=-1).flatten(-2)
    assert float(cosine(guess, across)) == pytest.approx(0.5, abs=1e-6)
    same = guess[:, :, :1].expand_as(guess)
    assert float(infonce(same, guess)) >= math.log(9) - 1e-5  # the same everywhere: no better than chance
    assert float(infonce(same, same)) == pytest.approx(math.log(9))
    assert 0 < float(infonce(guess, guess)) < 0.2


@pytest.mark.parametrize(("kind", "target"), KINDS)
@pytest.mark.parametrize("length", [2, 7, 12])
@pytest.mark.parametrize("source", ["position", "tokens"])
def test_every_loss_is_in_its_range_at_any_length(source, length, kind, target):
    value = FutureLoss(kind, target)(seen_by(source, length=length)).item()
    assert math.isfinite(value) and value >= 0
    assert kind != "cosine" or value <= 1


def test_kl_is_nothing_for_the_true_weights_and_something_for_others():
    each = seen_by(dim=11)[0]
    weights = true_weights(each.scores, 11)
    seen = torch.ones(12, 12, dtype=torch.bool).tril()
    right = replace(each, past_weights=weights.masked_fill(~seen, 0), future_weights=weights.masked_fill(seen, 0))
    assert float(FutureLoss("kl")([right])) == pytest.approx(0, abs=1e-12)
    assert FutureLoss("kl")([each]).item() > 0.01


def test_kl_by_hand():
    """Two positions of one head; the first gives 3/4 to itself and 1/4 ahead, and predicts a half each."""
    one = torch.ones(1, 1, 2, 1, dtype=torch.float64)
    query, key = (torch.tensor(each, dtype=torch.float64).view(1, 1, 2, 1) for each in ([1.0, 0.0], [math.log(3), 0.0]))
    halves = torch.tensor([[0.5, 0.0], [0.5, 0.5]]).double().view(1, 1, 2, 2)
    ahead = torch.tensor([[0.0, 0.5], [0.0, 0.0]]).double().view(1, 1, 2, 2)
    each = Seen(query, key, one, one, one, halves, ahead, 1, "position")
    expected = 0.75 * math.log(0.75 / 0.5) + 0.25 * math.log(0.25 / 0.5)
    assert float(FutureLoss("kl")([each])) == pytest.approx(expected, abs=1e-7)


def test_the_last_position_has_no_future_and_is_not_counted():
    each = seen_by()[0]
    moved = replace(each, future=each.future + torch.eye(12).double()[-1].view(1, 1, 12, 1) * 1e6)
    for kind in ("mse", "cosine", "infonce"):
        assert FutureLoss(kind)([moved]).item() == pytest.approx(FutureLoss(kind)([each]).item())


def test_both_targets_differ_and_agree_with_their_definitions():
    each = seen_by(dim=11)[0]
    whole = (each.query @ each.key.transpose(-2, -1)).softmax(-1)
    later = torch.ones(12, 12, dtype=torch.bool).triu(1)
    assert torch.allclose(true_contribution(each), whole.masked_fill(~later, 0) @ each.value, atol=1e-12)
    causal = (each.query @ each.key.transpose(-2, -1)).masked_fill(later, -torch.inf).softmax(-1)
    difference = true_contribution(each, "difference")
    assert torch.allclose(difference, whole @ each.value - causal @ each.value, atol=1e-12)
    assert not torch.allclose(difference, true_contribution(each), atol=1e-2)
    guess = predicted_contribution(each, "difference")
    assert torch.allclose(guess, each.past + each.future - causal @ each.value, atol=1e-12)


def test_a_shuffled_target_is_that_of_another_text():
    each = seen_by()[0]
    rolled = replace(each, **{name: getattr(each, name).roll(1, 0) for name in ("query", "key", "value")})
    for kind in ("mse", "cosine", "infonce"):
        plain, other = FutureLoss(kind)([rolled]), FutureLoss(kind, shuffled=True)([each])
        assert float(plain) == pytest.approx(float(other))
        assert float(other) != pytest.approx(float(FutureLoss(kind)([each])))


def test_the_layers_of_the_loss_are_chosen():
    seen = seen_by()
    alone = [float(FutureLoss()([each])) for each in seen]
    assert [float(FutureLoss(layers=(i,))(seen)) for i in (0, 1)] == alone
    assert float(FutureLoss()(seen)) == pytest.approx(sum(alone) / 2)


# -- one clear error ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "l1"}, "no future loss 'l1'; there are mse, cosine, infonce, kl"),
        ({"target": "whole"}, "no target 'whole'; there are joint, difference"),
        ({"kind": "kl", "target": "difference"}, "no target"), ({"weight": -1.0}, "number from 0"),
        ({"weight": float("nan")}, "number from 0"), ({"weight": float("inf")}, "number from 0"),
        ({"layers": ()}, "at least one"),
    ],
)  # fmt: skip
def test_a_loss_that_is_none_is_refused(change, message):
    with pytest.raises(ModelError, match=message):
        FutureLoss(**change)


def test_what_cannot_be_compared_is_refused():
    seen = seen_by()
    with pytest.raises(ModelError, match="no layer was watched"):
        FutureLoss()([])
    with pytest.raises(ModelError, match="0 to 1 with columns"):
        FutureLoss(layers=(2,))(seen)
    with pytest.raises(ModelError, match="at least one, and none twice"):
        FutureLoss(layers=(0, 0))
    with (cached := model_of()).watched() as late:
        cache = Cache()
        cached(some_ids()[:, :6], cache=cache)
        cached(some_ids()[:, 6:], cache=cache)
    for kind in LOSSES:
        with pytest.raises(ModelError, match="seen with a cache"):
            FutureLoss(kind)(late)
    with pytest.raises(ModelError, match="stand for no position"):
        FutureLoss("kl")(seen_by("memory"))
    with (model := model_of()).watched() as one:
        model(some_ids(rows=1))
    with pytest.raises(ModelError, match="take 2 or more in a batch"):
        FutureLoss(shuffled=True)(one)
    short = seen_by(length=1)
    with pytest.raises(ModelError, match="text of one token"):
        FutureLoss()(short)
