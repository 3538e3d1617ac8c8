"""Packed and repeated batches: the states, losses and gradients of texts alone, nothing left behind."""

import pytest
import torch
from transformers import GPTBigCodeConfig, GPTBigCodeForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import labkit
from labkit import masks
from labkit.auditing.checks import Subject, packed_batch
from labkit.decoder import hooks, packing
from labkit.decoder.anatomy import CACHE, find_decoder
from labkit.decoder.packing import arrange, packed, why_not
from labkit.decoder.running import Runner
from labkit.errors import ConversionError
from labkit.models.heads import Head

LENGTHS = (20, 3, 7, 11, 1, 14)  # some longer than the window of 8 tokens that the tiny Gemmas have
MODELS = [
    ("tiny-gpt2", "sdpa"), ("tiny-gpt2", "eager"), ("tiny-gemma", "sdpa"), ("tiny-gemma2", "eager"),
    ("tiny-gemma3", "sdpa"), ("tiny-gemma3", "eager"), ("tiny-gemma3", "flex_attention"), ("tiny-llama", "sdpa"),
]  # fmt: skip
CONVERSIONS = {"causal": None, "bidirectional": {}, "halve": {"window": "halve"}, "mixed": {"layers": [1]}}
FLASH = "flash_attention_2"


def converted(model, mode="bidirectional"):
    return model if CONVERSIONS[mode] is None else labkit.to_bidirectional(model, **CONVERSIONS[mode])


def batch_of(lengths=LENGTHS, left=False):
    """ids and attention_mask (texts, longest), padded on the right; with `left`, every second text on the left."""
    width = max(lengths)
    ids = torch.randint(10, 200, (len(lengths), width), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(width) < torch.tensor(lengths)[:, None]).long()
    if left:
        mask[1::2] = mask[1::2].flip(1)
    return ids, mask


def states(model, ids, mask=None, **more):
    return model.base_model(input_ids=ids, attention_mask=mask, **more).last_hidden_state


@torch.no_grad()
def states_alone(model, ids, mask):
    """The states of the real tokens, (tokens, dim), of each text on its own."""
    return torch.cat([states(model, text[real][None])[0] for text, real in zip(ids, mask.bool(), strict=True)])


def assert_close(a, b):
    assert float((a - b).norm() / b.norm()) < 1e-5


def computed_slots(model):
    """A list that notes the (rows, width) of what the first layer computes."""
    slots = []
    layer = find_decoder(model).layers[0]
    layer.register_forward_pre_hook(lambda _, args, kwargs: slots.append(tuple(args[0].shape[:2])), with_kwargs=True)
    return slots


# ---- packed batches --------------------------------------------------------------------------------------------------


@pytest.mark.matrix
@pytest.mark.parametrize("mode", list(CONVERSIONS))
@pytest.mark.parametrize(("name", "attn"), MODELS)
@torch.compiler.set_stance("force_eager")  # flex attention would be compiled
def test_each_text_has_the_states_it_has_alone_and_padding_has_zeros(tiny, name, attn, mode):
    model = converted(tiny(name, attn).model, mode)
    ids, mask = batch_of(left=True)
    alone, slots = states_alone(model, ids, mask), computed_slots(model)
    for training in (False, True):
        with torch.no_grad(), packed(model.train(training)):
            got = states(model, ids, mask)
        assert_close(got[mask.bool()], alone)
        assert not got[~mask.bool()].any()
    assert slots[0][0] * slots[0][1] < ids.numel()  # it was packed


@pytest.mark.parametrize("outside", [True, False])
@pytest.mark.parametrize(
    "rule", [masks.prefix(3), masks.sliding_window(4), ~masks.causal() & masks.sliding_window(6, False)], ids=repr
)
def test_a_mask_put_in_force_holds_within_each_text(tiny, rule, outside):
    model = converted(tiny("tiny-gemma3").model)
    ids, mask = batch_of(left=True)
    with labkit.masked(model, rule):
        alone = states_alone(model, ids, mask)
    first, second = labkit.masked(model, rule), packed(model)
    with torch.no_grad(), first if outside else second, second if outside else first:
        assert_close(states(model, ids, mask)[mask.bool()], alone)


def subject_of(model, verdict):
    """The model as the checks of the audit take it."""
    decoder = find_decoder(model)
    return Subject(model, decoder, Runner(model, decoder), [], verdict, [])


@pytest.mark.parametrize("mode", ["causal", "bidirectional"])
def test_a_leaking_packing_is_caught_by_the_audit(tiny, mode, monkeypatch):
    model = converted(tiny("tiny-llama", "eager").model, mode)
    monkeypatch.setattr(hooks, "_cells", lambda mask, call, q_len, *_: torch.ones(1, q_len, q_len).bool())
    assert [problem.kind for problem in packed_batch(subject_of(model, mode))] == ["packing-leak"]


TARGETS = {  # of a loss, by task; None is the language model
    "question-answering": lambda ids, mask: {"start_positions": mask.sum(-1) // 2, "end_positions": mask.sum(-1) - 1},
    None: lambda ids, mask: {"labels": ids.masked_fill(mask == 0, -100)},
}


@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
@pytest.mark.parametrize("task", list(TARGETS))
@pytest.mark.parametrize("name", ["tiny-gpt2", "tiny-gemma3"])
def test_loss_and_gradients_are_those_of_the_padded_batch(name, task, checkpointing):
    head = Head(task, dropout=0.0) if task else None
    model = converted(labkit.load(name, task=head, device="cpu").model, "bidirectional" if task else "causal").train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})

    def loss_and_gradients():
        model.zero_grad()
        loss = model(input_ids=ids, attention_mask=mask, **TARGETS[task](ids, mask)).loss
        loss.backward()
        return loss.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    ids, mask = batch_of()
    loss, gradients = loss_and_gradients()
    slots = computed_slots(model)
    with packed(model):
        loss_packed, gradients_packed = loss_and_gradients()
    assert slots[0][0] < len(ids)
    torch.testing.assert_close(loss_packed, loss, rtol=1e-5, atol=0)
    assert_close(gradients_packed, gradients)


def test_all_hidden_states_come_back_padded(tiny):
    model, (ids, mask) = converted(tiny("tiny-gemma3").model), batch_of()
    given = {"input_ids": ids, "attention_mask": mask, "output_hidden_states": True}
    with torch.no_grad():
        padded = model.base_model(**given).hidden_states
        with packed(model):
            got = model.base_model(**given).hidden_states
            by_tuple = model.base_model(**given, return_dict=False)[0]
    for one, other in zip(got, padded, strict=True):
        assert_close(one[mask.bool()], other[mask.bool()])
    assert torch.equal(by_tuple, got[-1])


@pytest.mark.parametrize("mode", ["causal", "bidirectional"])
def test_full_batches_go_through_and_the_model_is_as_it_was_also_after_an_error(tiny, mode):
    model = converted(tiny("tiny-gemma3").model, mode)
    ids, mask = batch_of()

    def hooks():
        return [len(h) for m in model.modules() for h in (m._forward_pre_hooks, m._forward_hooks)], set(vars(stack))

    stack = model.base_model
    before = hooks()
    with torch.no_grad():
        expected = states(model, ids, mask)
        with pytest.raises(IndexError), packed(model):
            states(model, ids + 10_000, mask)
        assert hooks() == before and torch.equal(states(model, ids, mask), expected)
        slots = computed_slots(model)
        with packed(model), packed(model):
            states(model, ids, mask)
            states(model, ids, torch.ones_like(mask))
    assert slots[0][0] < len(ids) and slots[1] == ids.shape


def test_a_row_of_padding_alone_has_zeros_and_a_batch_of_it_is_an_error(tiny):
    model, (ids, mask) = converted(tiny("tiny-gemma3").model), batch_of()
    mask[2] = 0
    with torch.no_grad(), packed(model):
        assert states(model, ids, mask)[:, 0].any(-1).tolist() == [True, True, False, True, True, True]
        with pytest.raises(ConversionError, match="no real token"):
            states(model, ids, torch.zeros_like(mask))


def test_positions_restart_so_rows_may_be_longer_than_the_model_has_positions(tiny, monkeypatch):
    monkeypatch.setattr(packing, "GROWTH", (2.0,))
    model = tiny("tiny-gpt2").model  # of 1,024 learned positions
    ids, mask = batch_of((700, 400, 300))
    slots = computed_slots(model)
    with torch.no_grad(), packed(model):
        got = states(model, ids, mask)
    assert slots == [(1, 1400)]
    assert_close(got[mask.bool()], states_alone(model, ids, mask))


def test_flash_attention_gets_one_row_without_a_mask_and_with_positions_that_restart(tiny, monkeypatch):
    calls = []

    def kernel(module, query, key, value, attention_mask, position_ids=None, is_causal=None, **_):
        calls.append((query.shape[0], query.shape[2], attention_mask, is_causal, int((position_ids == 0).sum())))
        return value.repeat_interleave(query.shape[1] // value.shape[1], 1).transpose(1, 2).contiguous(), None

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, FLASH, kernel)
    model = converted(tiny("tiny-llama").model)
    model.config._attn_implementation = FLASH
    with torch.no_grad(), packed(model):
        states(model, *batch_of(left=True))
    assert calls == [(1, sum(LENGTHS), None, False, len(LENGTHS))] * 2


def test_texts_are_arranged_first_fit_decreasing_and_each_once():
    assert arrange([20, 3, 7, 11, 1, 14, 0], 21) == [[0, 4], [5, 2], [3, 1]]
    generator = torch.Generator().manual_seed(1)
    for _ in range(20):
        lengths = torch.randint(0, 60, (30,), generator=generator).tolist()
        for options in ({}, {"row_length": 40}, {"keys_per_token": 100.0}):
            rows = arrange(lengths, **options)
            assert sorted(t for row in rows for t in row) == [t for t, length in enumerate(lengths) if length]
            slots = len(rows) * max(sum(lengths[t] for t in row) for row in rows)
            assert slots <= max(lengths) * sum(length > 0 for length in lengths)
    assert arrange([9, 9, 9], keys_per_token=1.0) == [[0], [1], [2]]  # nothing is gained: a row for each


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_what_has_no_place_in_a_packed_row_is_refused(tiny):
    model = tiny("tiny-llama").model
    ids = batch_of()[0]
    cases = {
        "position_ids": {"input_ids": ids, "position_ids": torch.arange(20)[None]},
        "inputs_embeds": {"inputs_embeds": torch.zeros(1, 2, 64)},
        CACHE: {"input_ids": ids, CACHE: object()},
        "output_attentions": {"input_ids": ids, "output_attentions": True},
        "padding mask of the same shape": {"input_ids": ids, "attention_mask": torch.ones(6, 1, 20, 20)},
    }
    with packed(model):
        for message, call in cases.items():
            with pytest.raises(ConversionError, match=message):
                model.base_model(**call)


def on_backend(model, backend):
    model.config._attn_implementation = backend
    return model


def without_positions(model):
    model.base_model.forward = lambda input_ids, attention_mask=None: None
    return model


def bigcode():
    sizes = {"vocab_size": 64, "n_positions": 64, "n_embd": 32, "n_layer": 1, "n_head": 2}
    return GPTBigCodeForCausalLM(GPTBigCodeConfig(**sizes, attn_implementation="eager")).eval()


def test_why_not_names_what_is_in_the_way(tiny):
    assert why_not(tiny("tiny-gpt2").model) is None and why_not(bigcode()) is None
    reasons = {
        "takes no position_ids": without_positions(tiny("tiny-llama").model),
        "no decoder": torch.nn.Linear(2, 2),
        "'paged|something'": on_backend(tiny("tiny-llama").model, "paged|something"),
        "no positions on to the flash kernel": on_backend(bigcode(), FLASH),
    }
    for reason, model in reasons.items():
        assert reason in why_not(model)
        with pytest.raises(ConversionError, match="cannot be packed"), packed(model):
            pass
    opened = tiny("tiny-llama").model
    opened.config.is_causal = False  # without labkit: which mask its layers are meant to have is not known
    subject = subject_of(opened, "bidirectional")
    assert not list(packed_batch(subject)) and "other means than labkit.to_bidirectional" in subject.notes[0]
