"""The arms of Future Attention: names, equal parameters, equal starts, causality, and losses by hand."""

import pytest
import torch
from torch.nn import functional as F

from labkit.auditing.leaks import find_leaks
from labkit.errors import ModelError
from labkit.future_attention.arms import arm, matched_inner, token_losses
from labkit.gpt import GPT, GPTConfig

CONFIG = GPTConfig(vocab_size=300, context=16, width=16, layers=1, heads=2)


def test_arms_are_named_as_they_are_trained():
    loss = arm("future:mse-difference:50", 0.5).loss
    assert (loss.kind, loss.target, loss.weight, loss.shuffled) == ("mse", "difference", 0.5, False)
    assert arm("future:mse@1000:50", 0.5).loss.weight == 1000 and arm("tokens:kl:5", 1.0, (0,)).loss.layers == (0,)
    assert arm("shuffled-tokens:cosine@2:50").loss.shuffled and arm("future:none:50").loss is None
    dropped = arm("dropout:0.2").build(CONFIG, 0).config
    assert (dropped.dropout, dropped.attention_dropout) == (0.2, 0.2)


@pytest.mark.parametrize(
    "name",
    ["", "base", "baseline:1", "dropout", "dropout:1.5", "dropout:x", "memory:0", "memory:2.5", "future:50",
     "future:l2:50", "future:cosine:0", "future:kl-difference:5", "shuffled:none:5", "multi-token:0",
     "tokens:cosine:5:5", "future:cosine:nan", "memory:inf", "future:mse@x:5", "future:mse@-1:5", "future:none@2:5",
     "future:cosine:16", "multi-token:16"],
)  # fmt: skip
def test_an_unknown_arm_is_refused(name):
    with pytest.raises(ModelError):
        arm(name).build(CONFIG, 0)


@pytest.mark.parametrize("config", [CONFIG, GPTConfig(2048, 128, 128, 4, 4), GPTConfig(300, 16, 16, 2, 2, inner=40)])
def test_the_baseline_has_as_many_parameters_as_the_model_with_columns(config):
    counts = {
        name: sum(p.numel() for p in arm(name).build(config, 0).parameters())
        for name in ("baseline", "smaller", "future:cosine:5", "memory")
    }
    assert counts["future:cosine:5"] == counts["memory"]
    assert abs(counts["baseline"] - counts["memory"]) <= config.layers * (2 * config.width + 1)
    assert counts["memory"] - counts["smaller"] == config.layers * 2 * config.context * config.width


def test_all_arms_of_a_seed_start_with_the_same_weights():
    plain, state = arm("smaller").build(CONFIG, 3).state_dict(), torch.get_rng_state()
    for name in ("baseline", "dropout:0.1", "future:cosine:5", "tokens:none:5", "memory", "multi-token:1"):
        model = arm(name).build(CONFIG, 3).state_dict()
        for key, weight in plain.items():
            assert torch.equal(model[key][tuple(slice(n) for n in weight.shape)], weight), (name, key)
    wide = arm("baseline").build(CONFIG, 3).state_dict()["h.0.mlp.c_fc.weight"]
    assert wide.shape == (matched_inner(CONFIG), 16) and bool((wide[64:] != 0).all())
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(arm("smaller").build(CONFIG, 4).state_dict()["wte.weight"], plain["wte.weight"])


def test_the_tokens_after_the_next_by_hand():
    one, ids = arm("multi-token:2"), torch.randint(300, (3, 17))
    model = one.build(CONFIG, 0)
    loss, later = one.losses(model, ids[:, :-1], ids[:, 1:])
    hidden, expected = model.hidden(ids[:, :-1]), []
    for k, layer in enumerate(model.ahead, 1):
        logits = (hidden + layer(hidden)) @ model.wte.weight.T
        expected.append(F.cross_entropy(logits[:, : 16 - k].flatten(0, 1), ids[:, 1 + k :].flatten()))
    assert later.item() == pytest.approx(torch.stack(expected).mean().item(), rel=1e-5)
    assert loss.item() == pytest.approx(model.loss(ids[:, :-1], ids[:, 1:]).item())


def test_token_losses_by_hand():
    model, rows = GPT(CONFIG), torch.randint(300, (3, 17))
    losses, logits = token_losses(model, rows, batch_size=2), model(rows[1:2, :-1])
    assert losses.shape == (3, 16)
    assert losses[1, 4].item() == pytest.approx(-logits[0, 4].log_softmax(-1)[rows[1, 5]].item(), rel=1e-5)


@pytest.mark.parametrize("name", ["baseline", "memory:20", "future:cosine:10", "tokens:infonce:10", "multi-token:1"])
def test_every_arm_is_causal(name):
    config = GPTConfig(vocab_size=30, context=16, width=16, layers=2, heads=2)
    report = find_leaks(arm(name).build(config, 0).eval())  # also in train mode
    assert report.clean, str(report)
