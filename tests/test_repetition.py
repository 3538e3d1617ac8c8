"""A text read twice by a causal model: against texts that are written twice."""

import pytest
import torch

import labkit
from labkit.decoder.hooks import masked
from labkit.decoder.packing import packed
from labkit.decoder.repetition import repeated
from labkit.errors import ConversionError
from labkit.masks import causal, sliding_window

NAMES = ("tiny-gpt2", "tiny-gemma3", "tiny-llama")


def states(model, ids, real=None):
    with torch.no_grad():
        return model.base_model(input_ids=ids, attention_mask=real).last_hidden_state


@pytest.fixture
def batch():
    ids = torch.randint(5, 60, (3, 9), generator=torch.Generator().manual_seed(0))
    real = torch.ones_like(ids)
    real[1, 6:], real[2, 1:] = 0, 0
    return ids, real


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("times", [2, 3])
def test_the_states_are_those_of_the_last_copy_of_a_text_written_so_often(name, times, batch):
    model, (ids, real) = labkit.load(name).model, batch
    with repeated(model, times):
        got = states(model, ids, real)
    for row, length in enumerate(real.sum(1).tolist()):
        written = states(model, ids[row, :length].repeat(times)[None])[0, -length:]
        assert torch.allclose(got[row, :length], written, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_bos_and_eos_stay_single(name, batch):
    model, (ids, real) = labkit.load(name).model, batch
    config = model.config
    ids[:, 0] = config.bos_token_id
    for row, length in enumerate(real.sum(1).tolist()):
        if length > 1:
            ids[row, length - 1] = config.eos_token_id
    with repeated(model):
        got = states(model, ids, real)
    for row, length in enumerate(real.sum(1).tolist()):
        if length > 2:
            bos, body, eos = ids[row, :1], ids[row, 1 : length - 1], ids[row, length - 1 : length]
            written = states(model, torch.cat([bos, body, body, eos])[None])[0]
            expected = torch.cat([written[:1], written[1 + len(body) :]])
            assert torch.allclose(got[row, :length], expected, atol=1e-5)


def test_on_the_second_reading_a_causal_model_has_seen_what_follows():
    model = labkit.load("tiny-llama").model
    ids = torch.tensor([[10, 11, 12, 13, 14]])
    other = ids.clone()
    other[0, 4] = 30
    assert torch.equal(states(model, ids)[0, :4], states(model, other)[0, :4])  # once: causal
    with repeated(model):
        assert not torch.allclose(states(model, ids)[0, 0], states(model, other)[0, 0], atol=1e-3)


@pytest.mark.parametrize("name", NAMES)
def test_it_goes_together_with_packing(name, batch):
    model, (ids, real) = labkit.load(name).model, batch
    with repeated(model):
        plain = states(model, ids, real)
    with packed(model), repeated(model):
        got = states(model, ids, real)
    assert torch.allclose(got[real.bool()], plain[real.bool()], atol=1e-5)


def test_a_mask_in_force_is_one_on_the_repeated_text(batch):
    model, (ids, real) = labkit.load("tiny-llama").model, batch
    with repeated(model):
        plain = states(model, ids, real)
        with masked(model, causal()):
            assert torch.allclose(states(model, ids, real)[real.bool()], plain[real.bool()], atol=1e-5)
        with masked(model, sliding_window(3)):  # the second reading sees the end of the first, and no more of it
            near = states(model, ids, real)
    written = ids[1, :6].repeat(2)[None]
    with masked(model, sliding_window(3)):
        assert torch.allclose(near[1, :6], states(model, written)[0, 6:], atol=1e-5)


def test_the_model_is_as_it_was_also_after_an_error(batch):
    model, (ids, real) = labkit.load("tiny-gpt2").model, batch
    before = states(model, ids, real)
    left = real.flip(1)
    with pytest.raises(ConversionError, match="padding on the right"), repeated(model):
        states(model, ids, left)
    assert torch.equal(states(model, ids, real), before)
    assert not model.base_model._forward_pre_hooks and not model.base_model._forward_hooks


@pytest.mark.parametrize(
    ("name", "times", "call"),
    [
        ("position_ids", 2, {"position_ids": torch.arange(9)[None].expand(3, -1)}),
        ("inputs_embeds", 2, {"inputs_embeds": torch.zeros(3, 9, 64)}),
        ("1,200 tokens", 2, {"input_ids": torch.full((1, 600), 7), "attention_mask": None}),
        ("0 times", 0, {}),
    ],
)
def test_what_cannot_be_read_twice_is_refused(name, times, call, batch):
    model, (ids, real) = labkit.load("tiny-gpt2").model, batch
    with pytest.raises(ConversionError, match=name), repeated(model, times):
        model.base_model(**{"input_ids": ids, "attention_mask": real} | call)
