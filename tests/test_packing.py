"""Packed batches: the states, losses and gradients of the padded ones, no text seeing another, nothing left behind."""

import copy

import pytest
import torch

import labkit
from labkit import masks
from labkit.auditing.checks import Subject, packed_batch
from labkit.convert import MARK
from labkit.decoder import packing
from labkit.decoder.anatomy import CACHE
from labkit.decoder.hooks import LayerMasks
from labkit.decoder.packing import arrange, packed, why_not
from labkit.decoder.running import Runner
from labkit.errors import ConversionError
from labkit.models.heads import Head

LENGTHS = (20, 3, 7, 11, 1, 14)  # some longer than the window of 8 tokens that the tiny Gemmas have
MODELS = [
    ("tiny-gpt2", "sdpa"), ("tiny-gpt2", "eager"), ("tiny-gemma", "sdpa"), ("tiny-gemma2", "eager"),
    ("tiny-gemma3", "sdpa"), ("tiny-gemma3", "eager"), ("tiny-llama", "sdpa"),
]  # fmt: skip
ROWS = {"rows": 24, "one row": None}  # a row length: texts share rows under one mask; none: sdpa goes text by text


@pytest.fixture(params=list(ROWS))
def row_length(request, monkeypatch):
    monkeypatch.setattr(packing, "CALL_IN_TOKENS", 0)  # so that even these short texts are worth a call each
    return ROWS[request.param]


def converted(model, mode):
    if mode != "causal":
        labkit.to_bidirectional(model, layers=[1] if mode == "mixed" else None)
    return model


def padded_batch(lengths=LENGTHS, seed=0):
    """ids and attention_mask (texts, longest); every second text is padded on the left."""
    width = max(lengths)
    ids = torch.randint(10, 200, (len(lengths), width), generator=torch.Generator().manual_seed(seed))
    mask = torch.zeros(len(lengths), width, dtype=torch.long)
    for text, length in enumerate(lengths):
        mask[text, slice(width - length, None) if text % 2 else slice(length)] = 1
    return ids, mask


def right_padded(lengths=LENGTHS):
    ids, _ = padded_batch(lengths)
    return ids, (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()


def states(model, ids, mask=None, **more):
    return model.base_model(input_ids=ids, attention_mask=mask, **more).last_hidden_state


def gap(a, b):
    return float((a - b).norm() / b.norm())


def computed_slots(model):
    """A list that notes the (rows, width) of what the first layer computes."""
    seen = []
    layer = labkit.decoder.anatomy.find_decoder(model).layers[0]
    layer.register_forward_pre_hook(lambda _, args, kwargs: seen.append(tuple(args[0].shape[:2])), with_kwargs=True)
    return seen


def worst_leak(model, ids, mask, row_length):
    """The largest change of a text's states when a token of another one changes."""
    worst = 0.0
    with torch.no_grad(), packed(model, row_length):
        base = states(model, ids, mask)
        for text in range(len(ids)):
            changed = ids.clone()
            place = int(mask[text].nonzero()[len(mask[text].nonzero()) // 2])
            changed[text, place] = (ids[text, place] + 31) % 200
            moved = (states(model, changed, mask) - base).abs().amax((1, 2))
            assert moved[text] > 0
            moved[text] = 0
            worst = max(worst, float(moved.max()))
    return worst


def subject_of(model, verdict):
    """The model as the checks of the audit take it."""
    decoder = labkit.decoder.anatomy.find_decoder(model)
    return Subject(model, decoder, Runner(model, decoder), [], verdict, 512, 0, [])


@pytest.mark.matrix
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("mode", ["causal", "bidirectional", "mixed"])
@pytest.mark.parametrize(("name", "attn"), MODELS)
def test_each_text_has_the_states_it_has_alone_and_sees_no_other(tiny, name, attn, mode, training, row_length):
    model = converted(tiny(name, attn).model, mode).train(training)
    ids, mask = padded_batch()
    slots = computed_slots(model)
    with torch.no_grad(), packed(model, row_length):
        got = states(model, ids, mask)
    assert slots[0][0] * slots[0][1] < ids.numel()  # it was packed
    if attn == "sdpa":
        assert slots == ([(1, sum(LENGTHS))] if row_length is None else [(3, 24)])
    for text in range(len(ids)):
        real = mask[text].bool()
        with torch.no_grad():
            alone = states(model, ids[text, real][None])[0]
        assert gap(got[text, real], alone) < 1e-5
        assert not got[text, ~real].any()  # zeros at padding
    assert worst_leak(model, ids, mask, row_length) == 0


@pytest.mark.matrix
@pytest.mark.parametrize("mode", ["causal", "bidirectional"])
def test_under_flex_attention_each_text_has_the_states_it_has_alone(tiny, mode):
    ids, mask = padded_batch()
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):  # the proof of the conversion, too
        model = converted(tiny("tiny-gemma3", "flex_attention").model, mode)
        alone = [states(model, ids[text : text + 1, mask[text].bool()])[0] for text in range(len(ids))]
        with packed(model, 24):
            got = states(model, ids, mask)
        leak = worst_leak(model, ids, mask, 24)
    for text, expected in enumerate(alone):
        assert gap(got[text, mask[text].bool()], expected) < 1e-5
    assert leak < 1e-6


@pytest.mark.matrix
@pytest.mark.parametrize("window", ["halve", "global"])
def test_other_windows_hold_within_each_text(tiny, window, row_length):
    model = tiny("tiny-gemma3").model
    labkit.to_bidirectional(model, window=window)
    ids, mask = padded_batch()
    with torch.no_grad():
        alone = [states(model, ids[text : text + 1, mask[text].bool()])[0] for text in range(len(ids))]
        with packed(model, row_length):
            got = states(model, ids, mask)
    for text, expected in enumerate(alone):
        assert gap(got[text, mask[text].bool()], expected) < 1e-5
    assert worst_leak(model, ids, mask, row_length) < 1e-6


@pytest.mark.parametrize("mode", ["causal", "bidirectional"])
def test_a_leaking_packing_is_caught_by_the_same_test_and_by_the_audit(tiny, mode, row_length, monkeypatch):
    lm = tiny("tiny-llama", "eager")
    model = converted(lm.model, mode)
    ids, mask = padded_batch()
    monkeypatch.setattr(LayerMasks, "mask_for", lambda self, *_: None)  # as if no layer were given a mask
    whole_row = torch.zeros(1, 1, 1, 1)
    monkeypatch.setattr(packing.TextMask, "of", lambda *_: whole_row)  # and transformers built an open one
    assert worst_leak(model, ids, mask, row_length) > 1e-3
    problems = packed_batch(subject_of(model, mode))
    assert [p.kind for p in problems] == ["packing-leak"]
    assert "labkit.decoder.packing.packed" in problems[0]


def test_the_audit_says_why_a_model_was_not_packed(tiny):
    model = tiny("tiny-llama").model
    model.config.is_causal = False  # without labkit: which mask its layers are meant to have is not known
    subject = subject_of(model, "bidirectional")
    assert not packed_batch(subject)
    assert len(subject.notes) == 1 and "other means than labkit.to_bidirectional" in subject.notes[0]


HEADS = {
    "token-classification": lambda ids, mask: {"labels": (ids % 3).masked_fill(mask == 0, -100)},
    "question-answering": lambda ids, mask: {"start_positions": mask.sum(-1) // 2, "end_positions": mask.sum(-1) - 1},
    "sequence-classification": lambda ids, mask: {"labels": ids[:, 0] % 2},
    "embedding": lambda ids, mask: {},
    None: lambda ids, mask: {"labels": ids.masked_fill(mask == 0, -100)},
}


def loss_and_gradients(model, batch):
    model.zero_grad()
    out = model(**batch)
    loss = out.pooler_output[:, 0].sum() if "pooler_output" in out else out.loss
    loss.backward()
    return float(loss.detach()), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
@pytest.mark.parametrize("task", list(HEADS))
@pytest.mark.parametrize("name", ["tiny-gpt2", "tiny-gemma3"])
def test_loss_and_gradients_are_those_of_the_padded_batch(name, task, checkpointing, row_length):
    labels = ("O", "A", "B") if task == "token-classification" else ()
    pooling = {"pooling": "mean"} if task in ("sequence-classification", "embedding") else {}
    head = Head(task, labels=labels, dropout=0.0, **pooling) if task else None
    model = converted(labkit.load(name, task=head, device="cpu").model, "causal" if task is None else "bidirectional")
    model.train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    ids, mask = right_padded()
    batch = {"input_ids": ids, "attention_mask": mask, **HEADS[task](ids, mask)}
    loss, gradients = loss_and_gradients(model, batch)
    with packed(model, row_length):
        loss_packed, gradients_packed = loss_and_gradients(model, batch)
    assert loss_packed == pytest.approx(loss, rel=1e-5)
    assert gradients.keys() == gradients_packed.keys()
    size = max(float(g.norm()) for g in gradients.values())
    for name, gradient in gradients.items():
        assert float((gradients_packed[name] - gradient).norm()) < 1e-5 * size, name


def test_lora_learns_the_same(row_length):
    pytest.importorskip("peft")
    from labkit.tasks.adapters import trained_part

    head = Head("question-answering", dropout=0.0)
    model = converted(labkit.load("tiny-gemma3", task=head, device="cpu").model, "bidirectional")
    trained = trained_part(model, "lora", rank=2).train()
    ids, mask = right_padded()
    batch = {"input_ids": ids, "attention_mask": mask, **HEADS["question-answering"](ids, mask)}
    loss, gradients = loss_and_gradients(trained, batch)
    slots = computed_slots(trained)
    with packed(trained, row_length):
        loss_packed, gradients_packed = loss_and_gradients(trained, batch)
    assert slots[0][0] < len(ids)
    assert loss_packed == pytest.approx(loss, rel=1e-5)
    size = max(float(g.norm()) for g in gradients.values())
    assert all(float((gradients_packed[n] - g).norm()) < 1e-5 * size for n, g in gradients.items())


@pytest.mark.parametrize("outside", [True, False])
@pytest.mark.parametrize(
    "mask", [masks.prefix(3), masks.sliding_window(4), ~masks.causal() & masks.sliding_window(6, False)]
)
def test_a_mask_put_in_force_holds_within_each_text(tiny, mask, outside, row_length):
    model = converted(tiny("tiny-gemma3").model, "bidirectional")
    ids, real = padded_batch()
    with torch.no_grad():
        with labkit.masked(model, mask):
            expected = [states(model, ids[t, real[t].bool()][None])[0] for t in range(len(ids))]
        first, second = labkit.masked(model, mask), packed(model, row_length)
        with first if outside else second, second if outside else first:
            got = states(model, ids, real)
    for text, alone in enumerate(expected):
        assert gap(got[text, real[text].bool()], alone) < 1e-5


def test_all_hidden_states_come_back_padded(tiny, row_length):
    model = converted(tiny("tiny-gemma3").model, "bidirectional")
    ids, mask = right_padded()
    with torch.no_grad():
        padded = model.base_model(ids, attention_mask=mask, output_hidden_states=True).hidden_states
        with packed(model, row_length):
            got = model.base_model(ids, attention_mask=mask, output_hidden_states=True).hidden_states
            by_tuple = model.base_model(ids, attention_mask=mask, return_dict=False)[0]
    assert len(got) == len(padded)
    for one, other in zip(got, padded, strict=True):
        assert gap(one[mask.bool()], other[mask.bool()]) < 1e-5
    assert torch.equal(by_tuple, got[-1])


def test_padded_batches_of_one_or_equal_texts_lose_their_padding_and_full_ones_go_through(tiny):
    model = tiny("tiny-gpt2").model
    ids = torch.arange(40, 64).view(2, 12)
    mask = torch.ones_like(ids)
    slots = computed_slots(model)
    with torch.no_grad(), packed(model):
        assert torch.equal(states(model, ids, mask), states(model, ids))
        mask[:, :5] = 0
        got = states(model, ids, mask)
        one = states(model, ids[:1], mask[:1])
    assert slots[0] == slots[1] == (2, 12)
    assert slots[2][0] * slots[2][1] == 14
    assert slots[3] == (1, 7)
    with torch.no_grad():
        alone = states(model, ids[:, 5:])
    assert gap(got[:, 5:], alone) < 1e-5
    assert gap(one[0, 5:], alone[0]) < 1e-5


def test_a_row_of_padding_alone_has_zeros_and_a_batch_of_it_is_an_error(tiny, row_length):
    model = converted(tiny("tiny-gemma3").model, "bidirectional")
    ids, mask = right_padded()
    mask[2] = 0
    with torch.no_grad(), packed(model, row_length):
        got = states(model, ids, mask)
        assert not got[2].any()
        assert got[[0, 1, 3, 4, 5], 0].abs().amax(-1).min() > 0
        with pytest.raises(ConversionError, match="no real token"):
            states(model, ids, torch.zeros_like(mask))


@pytest.mark.parametrize("mode", ["causal", "bidirectional"])
def test_the_model_is_left_as_it_was_also_after_an_error(tiny, mode):
    model = converted(tiny("tiny-gemma3").model, mode)
    ids, mask = padded_batch()
    stack = model.base_model

    def hooks():
        return [len(h) for m in model.modules() for h in (m._forward_pre_hooks, m._forward_hooks)]

    before, attributes = hooks(), set(vars(stack))
    with torch.no_grad():
        expected = states(model, ids, mask)
        with pytest.raises(IndexError), packed(model):
            states(model, ids + 10_000, mask)
        assert hooks() == before
        assert set(vars(stack)) == attributes
        assert torch.equal(states(model, ids, mask), expected)
        with packed(model), packed(model, 30):  # nested: the inner row length counts, then the outer one
            slots = computed_slots(model)
            states(model, ids, mask)
        assert slots[0][1] <= 30


def test_what_has_no_place_in_a_packed_row_is_refused(tiny):
    model = tiny("tiny-llama").model
    ids, mask = padded_batch()
    cases = {
        "position_ids": {"input_ids": ids, "position_ids": torch.arange(20)[None]},
        "inputs_embeds": {"inputs_embeds": torch.zeros(1, 2, 64)},
        CACHE: {"input_ids": ids, CACHE: object()},
        "attention weights": {"input_ids": ids, "output_attentions": True},
        r"\(6, 1, 20, 20\)": {"input_ids": ids, "attention_mask": torch.ones(6, 1, 20, 20)},
        "a dict": {"input_ids": ids, "attention_mask": {}},
    }
    with packed(model):
        for message, call in cases.items():
            with pytest.raises(ConversionError, match=message):
                model.base_model(**call)
    with pytest.raises(ConversionError, match="row_length is 0"), packed(model, 0):
        pass


def test_why_not_names_what_is_in_the_way(tiny):
    assert why_not(tiny("tiny-gpt2").model) is None
    without = tiny("tiny-llama").model
    without.base_model.forward = lambda input_ids, attention_mask=None: None
    assert "takes no position_ids" in why_not(without)
    with pytest.raises(ConversionError, match="cannot be packed"), packed(without):
        pass
    assert "no decoder" in why_not(torch.nn.Linear(2, 2))
    llama = tiny("tiny-llama").model
    llama.config._attn_implementation = "paged|something"
    assert "'paged|something'" in why_not(llama)
    recorded = converted(tiny("tiny-llama").model, "bidirectional")
    fresh = tiny("tiny-llama").model
    setattr(fresh.config, MARK, copy.deepcopy(getattr(recorded.config, MARK)))
    assert "not in force" in why_not(fresh)


def test_flash_attention_gets_one_row_without_a_mask_and_with_positions_that_restart(tiny, monkeypatch):
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    handed, at_kernel = [], []

    def kernel(module, query, key, value, attention_mask, position_ids=None, is_causal=None, **_):
        handed.append((query.shape[0], query.shape[2], attention_mask, is_causal))
        at_kernel.append(position_ids)
        return value.repeat_interleave(query.shape[1] // value.shape[1], 1).transpose(1, 2).contiguous(), None

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "flash_attention_2", kernel)
    model = converted(tiny("tiny-llama").model, "bidirectional")
    ids, mask = padded_batch()
    model.config._attn_implementation = "flash_attention_2"
    seen = []
    model.base_model.layers[0].register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(kwargs["position_ids"]), with_kwargs=True
    )
    with torch.no_grad(), packed(model):
        states(model, ids, mask)
    assert handed == [(1, sum(LENGTHS), None, False)] * 2
    assert int((seen[0] == 0).sum()) == len(LENGTHS)
    assert len(at_kernel) == 2 and all(torch.equal(each, seen[0]) for each in at_kernel)


def test_a_family_that_hands_no_positions_to_the_flash_kernel_is_refused_there(tiny, monkeypatch):
    from transformers import GPTBigCodeConfig, GPTBigCodeForCausalLM

    sizes = {"vocab_size": 64, "n_positions": 64, "n_embd": 32, "n_layer": 1, "n_head": 2}
    model = GPTBigCodeForCausalLM(GPTBigCodeConfig(**sizes, attn_implementation="eager")).eval()
    assert why_not(model) is None
    model.config._attn_implementation = "flash_attention_2"
    assert "hands no positions on to the flash kernel" in why_not(model)


def test_texts_are_arranged_first_fit_decreasing_and_each_once():
    rows = arrange([20, 3, 7, 11, 1, 14, 0], 21)
    assert rows == [[0, 4], [5, 2], [3, 1]]
    generator = torch.Generator().manual_seed(1)
    for _ in range(20):
        lengths = torch.randint(0, 60, (30,), generator=generator).tolist()
        for options in ({}, {"row_length": 40}, {"dear_keys": 100.0}, {"one_by_one": True, "dear_keys": 100.0}):
            rows = arrange(lengths, **options)
            assert sorted(t for row in rows for t in row) == [t for t, length in enumerate(lengths) if length]
            slots = len(rows) * max(sum(lengths[t] for t in row) for row in rows)
            assert slots <= max(lengths) * sum(length > 0 for length in lengths)
    assert arrange([9, 9, 9], dear_keys=1.0) == [[0], [1], [2]]  # nothing is gained: a row for each


def test_positions_restart_so_rows_may_be_longer_than_the_model_has_positions(tiny):
    model = tiny("tiny-gpt2").model  # of 1,024 learned positions
    ids, mask = right_padded((700, 400, 300))
    slots = computed_slots(model)
    with torch.no_grad(), packed(model, 1400):
        got = states(model, ids, mask)
    assert slots == [(1, 1400)]
    with torch.no_grad():
        assert gap(got[1, :400], states(model, ids[1:2, :400])[0]) < 1e-5


def test_a_text_mask_lets_nothing_but_the_kernel_use_it():
    mask = packing.TextMask.of(masks.causal(), [2, 3], torch.device("cpu"))
    assert mask.shape == (1, 1, 5, 5)
    assert mask[:, :, :, :5] is mask
    for use in (lambda: mask.sum(), lambda: mask[:, :, :, :3], lambda: mask + 1, lambda: mask.to(torch.float32)):
        with pytest.raises(ConversionError, match="attn='eager'"):
            use()
    query = torch.randn(1, 2, 5, 4)
    with pytest.raises(ConversionError, match="no mask of its own"):
        torch.nn.functional.scaled_dot_product_attention(
            query, query, query, attn_mask=packing.TextMask.of(None, [2, 3], torch.device("cpu"))
        )
