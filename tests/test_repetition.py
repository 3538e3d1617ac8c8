"""A text read twice by a causal model: against texts that are written twice."""

import pytest
import torch

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


def written_out(model, ids, real, times=2):
    """The states (tokens, dim) of the last copy of each text, written so often between its bos and its eos."""
    kept = []
    for row, length in zip(ids, real.sum(1).tolist(), strict=True):
        text = row[:length]
        head = int(length > 1 and text[0] == model.config.bos_token_id)
        tail = length - int(length > 1 + head and text[-1] == model.config.eos_token_id)
        got = states(model, torch.cat([text[:head], text[head:tail].repeat(times), text[tail:]])[None])[0]
        kept.append(torch.cat([got[:head], got[len(got) - length + head :]]))
    return torch.cat(kept)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("times", [2, 3])
@pytest.mark.parametrize("special", [False, True], ids=["text", "bos and eos"])
def test_the_states_are_those_of_the_last_copy_of_a_text_written_so_often(tiny, name, times, special, batch):
    model, (ids, real) = tiny(name).model, batch
    if special:
        ids[:, 0] = model.config.bos_token_id
        ids[range(2), real.sum(1)[:2] - 1] = model.config.eos_token_id
    expected = written_out(model, ids, real, times)
    with repeated(model, times):
        torch.testing.assert_close(states(model, ids, real)[real.bool()], expected, atol=1e-5, rtol=1e-4)
    with packed(model), repeated(model, times):
        torch.testing.assert_close(states(model, ids, real)[real.bool()], expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("mask", [causal(), sliding_window(3)], ids=repr)
def test_a_mask_in_force_is_one_on_the_repeated_text(tiny, batch, mask):
    model, (ids, real) = tiny("tiny-llama").model, batch
    with masked(model, mask):
        expected = written_out(model, ids, real)
        with repeated(model):
            torch.testing.assert_close(states(model, ids, real)[real.bool()], expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("name", "times", "call"),
    [
        ("padding on the right", 2, {"attention_mask": (torch.arange(9) > 2).long().expand(3, -1)}),
        ("position_ids", 2, {"position_ids": torch.arange(9)[None].expand(3, -1)}),
        ("inputs_embeds", 2, {"inputs_embeds": torch.zeros(3, 9, 64)}),
        ("1,200 tokens", 2, {"input_ids": torch.full((1, 600), 7), "attention_mask": None}),
        ("0 times", 0, {}),
    ],
)
def test_what_cannot_be_read_twice_is_refused_and_the_model_is_as_it_was(tiny, name, times, call, batch):
    model, (ids, real) = tiny("tiny-gpt2").model, batch
    before = states(model, ids, real)
    with pytest.raises(ConversionError, match=name), repeated(model, times):
        model.base_model(**{"input_ids": ids, "attention_mask": real} | call)
    assert torch.equal(states(model, ids, real), before)
    assert not model.base_model._forward_pre_hooks and not model.base_model._forward_hooks
