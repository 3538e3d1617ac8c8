"""benchmarks/gpu/pack.py: a cut tokenizer encodes its texts to the same tokens, and other texts without loss."""

import json

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors, trainers

from benchmarks.gpu import pack

TEXTS = [
    "The ferry leaves at noon, and the next one leaves at three.",
    "A café by the harbour sells coffee   and <eos> sandwiches.",
]
OTHERS = ["The ferry is a long boat.", "Zürich ☃"]


@pytest.fixture(scope="module")
def spec():
    """A small tokenizer of Gemma's kind: byte fallback, a space is ▁, a bos by template, reserved tokens."""
    model = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    model.normalizer = normalizers.Replace(" ", "▁")
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<unused0>", "<unused1>", *(f"<0x{n:02X}>" for n in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=special[:4], show_progress=False, max_token_length=12)
    model.train_from_iterator(["the ferry leaves the harbour at noon", *TEXTS, *OTHERS[:1]] * 5, trainer)
    trained = json.loads(model.to_str())
    vocabulary = special + [token for token in trained["model"]["vocab"] if token not in special]
    trained["model"]["vocab"] = {token: number for number, token in enumerate(vocabulary)}
    trained["added_tokens"] = []
    model = Tokenizer.from_str(json.dumps(trained))
    model.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special[:6]])
    model.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    model.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 2)])
    return json.loads(model.to_str())


@pytest.mark.parametrize("as_text", [False, True])
def test_the_texts_have_the_same_tokens_and_others_are_encoded_without_loss(spec, as_text):
    smaller, old_ids = pack.cut(spec, TEXTS)
    assert len(old_ids) < len(spec["model"]["vocab"]) and old_ids == sorted(set(old_ids))
    full, cut = (Tokenizer.from_str(json.dumps(tokenizer)) for tokenizer in (spec, smaller))
    full.encode_special_tokens = cut.encode_special_tokens = as_text
    for text in TEXTS:
        assert [old_ids[number] for number in cut.encode(text).ids] == full.encode(text).ids
    for text in [*TEXTS, *OTHERS]:
        assert cut.decode(cut.encode(text).ids) == full.decode(full.encode(text).ids)
    assert cut.token_to_id("<unused0>") is not None and cut.token_to_id("<unused1>") is None
