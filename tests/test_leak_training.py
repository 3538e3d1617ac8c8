"""leak_meter: a model that sees the answer is found by training it, and an honest one is never accused."""

import json
import math

import pytest
import torch
from torch import nn

from labkit.datasets.embedded import passages
from labkit.errors import LabkitError
from labkit.gpt import GPT
from labkit.leak_meter import leak_meter
from tests import leaky_models as planted

pytestmark = pytest.mark.end_to_end

V = 16
SMALL = {"seeds": (0, 1), "steps": 80, "length": 8, "learning_rate": 1e-2}
TINY = {"seeds": (0, 1), "steps": 3, "length": 8, "batch_size": 2}
TEXT = torch.arange(400) % V


def honest(seed):
    return planted.Small(vocab_size=V)


class Bigram(nn.Module):
    """A model of one's own: what it predicts depends on the last token, and with scale 0 on nothing."""

    def __init__(self, scale=1.0):
        super().__init__()
        self.table, self.scale = nn.Embedding(V, V), scale

    def forward(self, ids):
        return {"logits": self.table(ids) * self.scale}


# -- random tokens -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["GPT", "tiny-gpt2"])
def test_on_random_tokens_only_the_unmasked_twin_gets_below_what_is_possible(tiny, name):
    model = (lambda seed: GPT(planted.small_config(vocab_size=V))) if name == "GPT" else tiny(name).model
    meter = leak_meter(model, V, **SMALL)
    as_built, unmasked = meter.arms["as built"], meter.arms["unmasked"]
    assert meter.clean
    assert set(meter.leaks) == {"unmasked"}
    assert "no causal model gets below the floor of 2.773" in meter.leaks["unmasked"]
    assert meter.floor == math.log(V)
    assert min(as_built.teacher_forced) > meter.floor - 0.02
    assert max(abs(a - b) for a, b in zip(as_built.in_sight, as_built.truncated, strict=True)) < 1e-4
    assert max(as_built.copy_rate + as_built.copy_rate_training) < 0.2
    assert max(unmasked.teacher_forced) < 0.3
    assert min(unmasked.copy_rate) > 0.98
    assert min(unmasked.truncated) > meter.floor + 0.5


BUGS = {
    "one layer": (lambda seed: planted.one_layer(1, vocab_size=V), None, "no causal model gets below"),
    "a mean": (lambda seed: planted.mean_of_the_text(vocab_size=V), None, "no causal model gets below"),
    "labels": (honest, planted.unshifted_loss, "the labels are misplaced"),
    "dropout path": (
        lambda seed: planted.ForgetfulInTraining(vocab_size=V, dropout=0.1),
        None,
        "train mode drops the mask",
    ),
}


@pytest.mark.parametrize(("make", "loss", "words"), BUGS.values(), ids=BUGS)
def test_a_hidden_bug_is_found_by_training_and_named(make, loss, words):
    meter = leak_meter(make, V, loss=loss, **SMALL)
    assert not meter.clean
    assert words in meter.leaks["as built"]


def test_a_leak_in_one_of_two_seeds_is_a_leak():
    meter = leak_meter(lambda seed: planted.one_to_the_right(vocab_size=V) if seed else honest(seed), V, **SMALL)
    assert not meter.clean


@pytest.mark.parametrize("seed", range(6))
def test_an_honest_model_of_any_shape_is_not_accused(seed):
    seeds = (seed, 1000 + seed)
    meter = leak_meter(lambda _: planted.honest_model(seed), V, seeds=seeds, steps=12, length=8, batch_size=4)
    assert meter.clean, str(meter)


def test_a_handful_of_tokens_is_no_evidence():
    meter = leak_meter(lambda seed: planted.Small(vocab_size=2), 2, seeds=range(20), steps=1, length=2, batch_size=1)
    assert min(meter.arms["as built"].teacher_forced) < meter.floor  # by luck
    assert min(meter.arms["as built"].reported) < meter.floor
    assert meter.clean, str(meter)


# -- real text ---------------------------------------------------------------------------------------------------------


FIELD_NOTES = torch.tensor(list(" ".join(passage.text for passage in passages()).encode("ascii", "ignore")))
COPYING = {**SMALL, "steps": 300, "batch_size": 32}  # enough to learn to copy


def test_on_text_the_unmasked_model_looks_better_and_is_worse():
    meter = leak_meter(lambda seed: GPT(planted.small_config(vocab_size=128)), FIELD_NOTES, **COPYING)
    honest_arm, unmasked = meter.arms["as built"], meter.arms["unmasked"]
    assert meter.clean
    assert "with the later tokens in sight" in meter.leaks["unmasked"]
    assert max(unmasked.in_sight) < 0.1 * min(honest_arm.in_sight)
    assert min(unmasked.truncated) > max(honest_arm.truncated) + 1
    assert min(unmasked.free_running) > max(honest_arm.free_running) + 1
    assert meter.floor is None and "floor" not in str(meter)
    data = json.loads(meter.to_json())
    assert (data["clean"], data["leaks"], data["floor"]) == (True, meter.leaks, None)
    assert data["arms"]["unmasked"]["curves"] == unmasked.curves


def test_generated_text_of_ones_own_model_is_judged_by_the_model_of_another_seed():
    meter = leak_meter(lambda seed: Bigram(float(seed)), TEXT, **TINY)  # that of seed 0 says 1 in V, whatever it reads
    assert set(meter.arms) == {"as built"} and meter.clean
    by_the_knowing, by_the_other = meter.arms["as built"].free_running
    assert by_the_other == pytest.approx(math.log(V))
    assert by_the_knowing != pytest.approx(math.log(V), abs=0.01)


# -- the same for both twins, and the same again -----------------------------------------------------------------------


def test_twins_start_from_the_same_weights_and_see_the_same_batches():
    runs = []  # module, weights before its first training step, and the ids of all steps

    def note(module, args):
        if module.training and len(args[0]) == 4:
            if not runs or runs[-1][0] is not module:
                runs.append((module, module.wte.weight.detach().clone(), []))
            runs[-1][2].append(args[0].clone())

    def factory(seed):
        model = GPT(planted.small_config(vocab_size=V))
        model.register_forward_pre_hook(note)
        return model

    leak_meter(factory, V, seeds=(3, 4), steps=6, length=8, batch_size=4)
    weights, ids = [run[1] for run in runs], [torch.stack(run[2]) for run in runs]
    assert len(runs) == 4 and ids[0].shape == (6, 4, 8)
    for first in (0, 2):
        assert torch.equal(weights[first], weights[first + 1]) and torch.equal(ids[first], ids[first + 1])
    assert not torch.equal(ids[0], ids[2]) and not torch.equal(weights[0], weights[2])
    assert len({tuple(row.tolist()) for row in ids[0].flatten(0, 1)}) == 24  # no row twice


def test_the_last_tenth_of_a_text_is_measured_on_and_never_trained_on():
    trained_on, measured_on = set(), set()

    def factory(seed):
        def note(module, args):
            into = trained_on if len(args[0]) == 5 else measured_on if len(args[0]) == 64 else set()
            into.update(args[0].flatten().tolist())

        model = honest(seed)
        model.register_forward_pre_hook(note)
        return model

    text = torch.cat([torch.arange(360) % 8, 8 + torch.arange(40) % 8])
    leak_meter(factory, text, **{**TINY, "batch_size": 5})
    assert trained_on == set(range(8))
    assert measured_on == set(range(8, 16))


@pytest.mark.parametrize("data", [V, TEXT], ids=["random tokens", "text"])
def test_the_same_seeds_give_the_same_numbers_whatever_was_drawn_before(data):
    model = planted.ForgetfulInTraining(vocab_size=V, dropout=0.1)
    measured = []
    for number in (0, 1):
        torch.manual_seed(number)
        random_state = torch.get_rng_state()
        measured.append(leak_meter(lambda seed: model, data, **TINY).to_json())
        assert torch.equal(torch.get_rng_state(), random_state)
    assert measured[0] == measured[1]


def test_the_model_that_is_given_is_not_trained_itself():
    model = honest(0).half()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for given in (model, lambda seed: model):
        starts = [curve[0] for curve in leak_meter(given, V, **TINY).arms["as built"].curves]
        assert abs(starts[0] - starts[1]) < 0.05  # each seed from the beginning, not from where the other ended
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seeds": (0,)}, "two seeds"),
        ({"seeds": (1, 1)}, "all different"),
        ({"data": 1}, "at least 2, not 1"),
        ({"data": TEXT[:80]}, "take 81"),
        ({"data": TEXT.float()}, "one line of token ids"),
        ({"data": TEXT.view(2, 200)}, r"\(2, 200\)"),
        ({"data": TEXT - 1}, "from -1"),
        ({"data": TEXT + 30}, "Small cannot be called on 8 token ids of up to 45"),
        ({"model": lambda seed: nn.Embedding(V, 8)}, r"expected \(1, 8, 16 or more\)"),
        ({"length": 33}, "33 tokens, and this model has positions for 32"),
        ({"steps": 0}, "steps=0"),
        ({"loss": lambda logits, ids: logits.sum() * torch.nan}, "training diverged, from 2.7.* to .*: lower the"),
    ],
)
def test_what_cannot_be_measured_is_refused_with_what_was_given(changes, message):
    given = {"model": honest, "data": V, **TINY, **changes}
    with pytest.raises(LabkitError, match=message):
        leak_meter(given.pop("model"), given.pop("data"), **given)
