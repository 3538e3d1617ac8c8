"""Fine-tuning from end to end on a tiny model: every task, both masks, kills, LoRA, folds, and what is refused."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest
import torch

import labkit
from labkit.datasets import embedded
from labkit.datasets.examples import Pair, Sentence
from labkit.decoder import limits
from labkit.errors import DataError, LabkitError, ModelError, TrainingError
from labkit.models.adapters import TASK, trained_part
from labkit.models.heads import SHORT_NAMES, head_in
from labkit.run_folder import RunFolder, read_json, silent
from labkit.tasks import finetune as finetune_module
from labkit.tasks import in_force
from labkit.tasks.base import NAMES, get
from labkit.tasks.finetune import crossvalidate, finetune, numbers
from labkit.tasks.pipeline import pipeline, predict_file
from labkit.training import draw, preset

pytestmark = pytest.mark.end_to_end

SETTINGS = preset("gemma", max_steps=6, eval_steps=2, learning_rate=1e-3, gradient_accumulation_steps=1)
SHORT = SETTINGS | {"max_steps": 2}
TASKS = {
    "qa": get("qa", max_length=128, doc_stride=64),
    "ner": get("ner", max_length=128),
    "classify": get("classify", max_length=96),
    "embed": get("embed", max_length=96),
}


def examples(task: str, split: str = "train", count: int = 12) -> list:
    """Embedded examples; half of the questions have no answer."""
    if task == "qa":
        questions = embedded.read("qa", "field-notes", split)
        kinds = [[q for q in questions if bool(q.answers) == answerable] for answerable in (True, False)]
        return [question for kind in kinds for question in kind[: count // 2]]
    if task == "embed":
        texts = embedded.read("classify", "which-way-round", split)[: 2 * count]
        pairs = zip(texts[::2], texts[1::2], strict=True)
        return [Pair(f"{a.id}+{b.id}", a.text, b.text, None, f"{split}{k}") for k, (a, b) in enumerate(pairs)]
    return embedded.read(task, {"ner": "field-notes", "classify": "which-way-round"}[task], split)[:count]


def run(task: str, folder, *, model="tiny-gpt2", train=None, **choices):
    choices = {"dev": examples(task, "dev", 6), "test": examples(task, "test", 6)} | choices
    choices = {"settings": SETTINGS, "log": silent} | choices
    described = choices.pop("options", TASKS[task])
    return finetune(described, model, examples(task) if train is None else train, folder, **choices)


def lines(file) -> list[dict]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def losses(folder) -> list[float]:
    return [entry["loss"] for entry in read_json(folder / "trainer_state.json")["log_history"] if "loss" in entry]


def interrupted(*_, **__):
    raise KeyboardInterrupt


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """task -> (metrics, folder) of a finished run, each made once."""
    made = {}

    def get_run(task: str):
        if task not in made:
            folder = tmp_path_factory.mktemp(task) / "run"
            made[task] = run(task, folder), folder
        return made[task]

    return get_run


@pytest.mark.parametrize("task", NAMES)
def test_a_run_leaves_metrics_predictions_and_a_model_with_its_head_mask_labels_and_options(done, task):
    metrics, folder = done(task)
    assert read_json(folder / "metrics.json") == json.loads(json.dumps(metrics))
    asked = {"asked": "bidirectional", "window": "keep", "layers": "all", "readings": 1}
    assert metrics["mask"] == asked | {"measured": "bidirectional", "opened": [0, 1]}
    assert metrics["steps"] == 6 and metrics["best_step"] in (2, 4, 6)
    assert metrics["metric"] in metrics["dev"] and metrics["metric"].removeprefix("best_") in metrics["test"]
    for side in ("dev", "test"):
        predicted = [row["id"] for row in lines(folder / f"predictions.{side}.jsonl")]
        assert predicted == [example.id for example in examples(task, side, 6)]
    pipe = pipeline(folder)
    model, record = pipe.lm.model, getattr(pipe.lm.model.config, TASK)
    assert labkit.audit(model, quick=True).verdict == "bidirectional"
    assert head_in(model.config).task == SHORT_NAMES[task]
    assert record["task"] == task and record["options"]["max_length"] == TASKS[task].max_length
    assert [model.config.id2label[k] for k in range(len(metrics["labels"]))] == metrics["labels"]
    card = (folder / "model" / "README.md").read_text(encoding="utf-8")
    assert "bidirectional" in card and "dev (n = 6)" in card and "test (n = 6)" in card
    if task == "qa":  # the threshold of no answer is chosen on dev, and used on test
        assert record["options"]["null_threshold"] == metrics["dev"]["best_f1_threshold"] != 0
        assert metrics["metric"] == "best_f1" and "best_f1" not in metrics["test"]
        assert metrics["baselines"]["test"]["no_answer"] == 50
    predictions = pipe.predict(examples(task, "test", 6))  # of the saved model, which is the best one
    for now, then in zip(predictions, lines(folder / "predictions.test.jsonl"), strict=True):
        assert now.keys() == then.keys()
        for name, value in then.items():
            if isinstance(value, float | str):
                assert now[name] == (pytest.approx(value, abs=1e-4) if isinstance(value, float) else value)


@pytest.mark.parametrize(
    ("model", "task", "layers", "opened"),
    [("tiny-gemma2", "ner", "all", [0, 1]), ("tiny-gemma3", "qa", "1", [1]), ("tiny-llama", "ner", "0", [0])],
)
def test_other_families_are_trained_saved_and_used_with_the_chosen_layers_unmasked(
    tmp_path, model, task, layers, opened
):
    head = {"backbone_dropout": 0.1, "init": "xavier"}
    settings = SHORT | {"gradient_checkpointing": model == "tiny-gemma3"}
    metrics = run(task, tmp_path / "run", model=model, layers=layers, head=head, settings=settings, test=())
    assert metrics["mask"]["opened"] == opened
    pipe = pipeline(tmp_path / "run")
    measured = labkit.audit(pipe.lm.model, quick=True).layers
    assert [layer.index for layer in measured if layer.verdict == "bidirectional"] == opened
    prediction = pipe(question="Who left?", context="The ferry left.") if task == "qa" else pipe("The ferry left.")
    assert {"qa": "n_best", "ner": "entities"}[task] in prediction


def test_runs_of_one_seed_start_alike_and_read_the_same_rows_whatever_their_mask(tmp_path):
    given = {"method": "lora", "settings": SHORT}
    bidirectional = run("ner", tmp_path / "bidirectional", keep_model=False, **given)
    torch.rand(7)
    causal = run("ner", tmp_path / "causal", mask="causal", **given)
    other = run("ner", tmp_path / "other", keep_model=False, method="lora", settings=SHORT | {"seed": 1})
    for name in ("data_order", "head_start", "adapters_start"):
        assert causal[name] == bidirectional[name] != other[name]
    assert losses(tmp_path / "causal") != losses(tmp_path / "bidirectional")
    assert causal["mask"]["measured"] == "causal"
    assert labkit.audit(labkit.load(tmp_path / "causal" / "model").model, quick=True).verdict == "causal"


def test_a_new_head_starts_alike_wherever_the_model_comes_from_and_a_trained_one_stays(done, tmp_path):
    built, folder = done("ner")
    given = {"keep_model": False, "settings": SHORT}
    labkit.load("tiny-gpt2").model.save_pretrained(tmp_path / "files")
    labkit.load("tiny-gpt2").tokenizer.save_pretrained(tmp_path / "files")
    assert run("ner", tmp_path / "run", model=tmp_path / "files", **given)["head_start"] == built["head_start"]
    trained = labkit.load(folder / "model").model
    again = run("ner", tmp_path / "again", model=folder / "model", **given)
    assert again["head_start"] == trained.head_sha256() != built["head_start"]


@pytest.mark.parametrize("layers", ["all", "0"])
def test_a_measured_mask_that_is_not_the_one_asked_for_stops_the_run(monkeypatch, tmp_path, layers):
    real = in_force.to_bidirectional
    wrong = {"all": lambda model, **_: model, "0": lambda model, layers, **more: real(model, layers=[1], **more)}
    monkeypatch.setattr(in_force, "to_bidirectional", wrong[layers])
    with pytest.raises(TrainingError, match="mask"):
        run("ner", tmp_path / "run", layers=layers)
    assert not (tmp_path / "run").exists()


def test_a_control_is_trained_and_leaves_scores_and_no_model(tmp_path):
    given = {"keep_model": False, "packing": True, "settings": SHORT, "test": ()}
    metrics = run("ner", tmp_path / "run", model="tiny-gemma3", mask="right-to-left", readings=2, **given)
    measured = {name: metrics["mask"][name] for name in ("asked", "measured", "readings")}
    assert measured == {"asked": "right-to-left", "measured": "right-to-left", "readings": 2}
    assert (tmp_path / "run" / "judged.dev.jsonl").exists() and not (tmp_path / "run" / "model").exists()


def test_a_mask_is_measured_in_16_bits_where_the_kernel_knows_no_others(monkeypatch):
    """A stand-in for flash attention's kernel, which needs a GPU: it refuses 32-bit numbers, as the real one does."""
    from transformers.integrations import flash_attention

    def kernel(query, key, value, mask, *, is_causal, target_dtype, **_):
        if query.dtype == torch.float32 and target_dtype in (None, torch.float32):
            raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
        heads = [states.transpose(1, 2) for states in (query, key, value)]
        allowed = torch.ones(1, 1, query.shape[1], key.shape[1], dtype=torch.bool)
        allowed = allowed.tril() if is_causal else allowed
        allowed = allowed if mask is None else allowed & mask[:, None, None, :].bool()  # flash: 1 at real tokens
        output = torch.nn.functional.scaled_dot_product_attention(*heads, attn_mask=allowed, enable_gqa=True)
        return output.transpose(1, 2)

    monkeypatch.setattr(flash_attention, "_flash_attention_forward", kernel)
    model = labkit.load("tiny-llama", task="token-classification", dtype="float32").model
    model.config._attn_implementation = "flash_attention_2"
    for mask in ("causal", "bidirectional"):
        with in_force.in_force(model, mask) as measured:
            assert measured["measured"] == mask


def test_weights_in_sixteen_bits_leave_the_frequencies_of_rope_as_they_are():
    lm = labkit.load("tiny-gemma3", task="question-answering", dtype="float32")
    before = {name: buffer.clone() for name, buffer in lm.model.named_buffers()}
    trained = trained_part(lm.model, "frozen", dtype="bfloat16")
    after = dict(trained.named_buffers())
    assert any("inv_freq" in name for name in before) and trained.backbone.dtype == torch.bfloat16
    assert all(after[name].dtype == old.dtype and torch.equal(after[name], old) for name, old in before.items())
    assert trained.head.weight.dtype == torch.float32


@pytest.mark.parametrize("method", ["full", "lora", "frozen"])
def test_what_is_trained_changes_and_what_is_not_stays(tmp_path, method):
    head = {"pooling": "attention_query"}
    metrics = run("classify", tmp_path / "run", method=method, head=head, settings=SHORT, test=())
    before = dict(labkit.load("tiny-gpt2", device="cpu").model.transformer.named_parameters())
    after = dict(labkit.load(tmp_path / "run" / "model", device="cpu").model.named_parameters())
    body = {name.removeprefix("transformer."): p for name, p in after.items() if name.startswith("transformer.")}
    changed = {name for name in before if not torch.equal(before[name], body[name])}
    matrices = {name for name in before if name.startswith("h.") and name.endswith(("c_attn.weight", "c_fc.weight"))}
    assert changed >= matrices if method != "frozen" else not changed
    assert ("wte.weight" in changed) is (method == "full")
    own = [p for name, p in after.items() if not name.startswith("transformer.")]
    assert method != "frozen" or metrics["trained_parameters"] == sum(p.numel() for p in own)
    assert all(p.dtype == torch.float32 for p in own)


def test_an_adapter_alone_is_the_whole_model_again(tmp_path):
    options = get("qa", prompt="evidence", order="question-last", max_length=256, doc_stride=128)
    given = {"train": embedded.read("qa", "evidence", "train")[:12], "dev": embedded.read("qa", "evidence", "dev")[:6]}
    given |= {"test": (), "options": options, "settings": SHORT}
    run("qa", tmp_path / "run", method="lora", rank=4, **given)
    folder = tmp_path / "run" / "adapter"
    adapted, whole = pipeline(folder), pipeline(tmp_path / "run")
    assert labkit.audit(adapted.lm.model, quick=True).verdict == "bidirectional"
    for name, weight in whole.lm.model.named_parameters():
        torch.testing.assert_close(dict(adapted.lm.model.named_parameters())[name], weight, rtol=0, atol=1e-6)
    asked = {"question": "having no energy", "context": embedded.read("qa", "evidence", "test")[0].context}
    assert adapted(asked)["probability"] == pytest.approx(whole(asked)["probability"], abs=1e-4)
    assert sum(file.stat().st_size for file in folder.iterdir()) < 200_000
    assert str(tmp_path) not in (folder / "adapter_config.json").read_text()
    more = run("qa", tmp_path / "more", model=folder, **given)
    assert more["mask"]["measured"] == "bidirectional" and more["head_start"] == adapted.lm.model.head_sha256()
    with pytest.raises(ModelError, match="question-answering"):
        labkit.load(folder, task="token-classification")
    record = json.loads((folder / "labkit_adapter.json").read_text())
    (folder / "labkit_adapter.json").write_text(json.dumps(record | {"head": 7}))
    with pytest.raises(LabkitError):
        pipeline(folder)


@pytest.mark.parametrize("task", ["ner", "embed"])
def test_packed_batches_have_the_losses_and_scores_of_the_same_batches_padded(task, tmp_path, monkeypatch):
    given = {"head": {"dropout": 0.0}, "keep_model": False}
    packed = run(task, tmp_path / "packed", packing=True, **given)
    monkeypatch.setattr(finetune_module, "draw", lambda lengths, settings, packed: draw(lengths, settings, packed=True))
    padded = run(task, tmp_path / "padded", **given)
    assert (packed["packing"], padded["packing"]) == (True, False)
    assert packed["data_order"] == padded["data_order"]
    assert losses(tmp_path / "packed") == pytest.approx(losses(tmp_path / "padded"), abs=1e-4)
    assert numbers(packed["test"]) == pytest.approx(numbers(padded["test"]), abs=1e-3, nan_ok=True)


def test_a_model_that_cannot_be_packed_is_trained_on_padded_rows(tmp_path, monkeypatch):
    messages = []
    monkeypatch.setattr(finetune_module, "why_not", lambda model: "its positions are odd")
    metrics = run("ner", tmp_path / "run", packing=True, keep_model=False, log=messages.append, settings=SHORT)
    assert metrics["packing"] is False and any("its positions are odd" in text for text in messages)


def test_a_run_killed_while_it_is_scored_is_scored_in_the_same_precision(tmp_path, monkeypatch):
    given = {"method": "lora", "settings": SHORT | {"dtype": "bfloat16"}, "keep_model": False}
    expected = run("ner", tmp_path / "whole", **given)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(RunFolder, "write", interrupted)
        run("ner", tmp_path / "run", **given)
    ended = run("ner", tmp_path / "run", resume=True, **given)
    measured = ("seconds", "tokens_per_second", "peak_memory_bytes")
    assert ended.keys() == expected.keys()
    assert all(ended[name] == expected[name] for name in expected.keys() - set(measured))
    for side in ("dev", "test"):
        file = f"predictions.{side}.jsonl"
        assert lines(tmp_path / "run" / file) == lines(tmp_path / "whole" / file)


def test_folds_are_summarised_and_interrupted_folds_resume(tmp_path, monkeypatch):
    given = [replace(example, group="") for example in examples("classify", count=24)]
    choices = {"k": 2, "settings": SHORT, "log": silent, "keep_model": False}
    metrics = crossvalidate(TASKS["classify"], "tiny-gpt2", given, tmp_path / "whole", **choices)
    tested = [lines(tmp_path / "whole" / f"fold-{number}" / "predictions.test.jsonl") for number in (1, 2)]
    assert metrics["n_per_fold"] == [len(fold) for fold in tested] == [12, 12]
    first, second = metrics["scores"]["accuracy"]["folds"]
    assert metrics["scores"]["accuracy"]["mean"] == pytest.approx((first + second) / 2)
    half_width = 12.706 * abs(first - second) / 2  # t(0.975, 1 degree of freedom) times the standard error
    assert metrics["scores"]["accuracy"]["half_width_95"] == pytest.approx(half_width, rel=1e-4)

    train, folders = finetune_module.finetune, []

    def breaks_off(task, model, rest, folder, **options):
        folders.append(folder.name)
        return interrupted() if len(folders) == 2 else train(task, model, rest, folder, **options)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(finetune_module, "finetune", breaks_off)
        crossvalidate(TASKS["classify"], "tiny-gpt2", given, tmp_path / "run", **choices)
    for _ in range(2):  # the second time, the run is finished
        resumed = crossvalidate(TASKS["classify"], "tiny-gpt2", given, tmp_path / "run", resume=True, **choices)
        assert resumed["scores"] == metrics["scores"]


SCORED = [Pair(str(k), f"the tide {k}", f"a boat {k}", k / 12) for k in range(12)]
UNSCORED = [replace(pair, id=f"u{pair.id}", score=None) for pair in SCORED]
LONG = Sentence.of_words("long", ["tide"] * 3000, ["O"] * 3000)
TOKENS = SETTINGS | {"batch_tokens": 96}


@pytest.mark.parametrize(
    ("task", "changes", "complaint"),
    [
        ("ner", {"train": []}, "no training examples"),
        ("ner", {"method": "half"}, "method is 'half'; choose one of full, lora, frozen"),
        ("ner", {"dev": examples("ner", "train", 3)}, "groups are in train and in dev too"),
        ("ner", {"test": examples("ner", "dev", 6)}, "dev and test are the same 6 examples"),
        ("ner", {"settings": TOKENS}, "batch_tokens 96"),
        ("embed", {"settings": TOKENS, "packing": True}, "one pair"),
        ("embed", {"method": "frozen"}, "nothing to train"),
        ("ner", {"mask": "causal", "readings": 2}, "repeat its input, a control"),
        ("ner", {"mask": "causal", "layers": "0"}, "the mask was to be causal in layers 0; measured: causal"),
        ("embed", {"train": SCORED[:8], "dev": SCORED[8:], "test": UNSCORED}, "one has pairs with scores"),
        ("ner", {"test": [LONG], "options": get("ner", max_length=2000)}, "2,000 tokens, and the model has"),
        ("ner", {}, "--gradient-checkpointing, or --method lora"),  # no memory is free
    ],
)
def test_what_cannot_be_trained_is_refused_before_anything_is_written(tmp_path, monkeypatch, task, changes, complaint):
    monkeypatch.setattr(finetune_module, "train", lambda *_, **__: pytest.fail("it was trained"))
    monkeypatch.setattr(limits, "available_bytes", lambda device: 0)
    with pytest.raises(LabkitError, match=complaint):
        run(task, tmp_path / "run", **changes)
    assert not (tmp_path / "run").exists()


def test_one_text_gives_one_prediction_and_a_list_a_list(done):
    pipe = pipeline(done("ner")[1])
    text = "Dessin went bankrupt in May."
    prediction = pipe(text)
    assert pipe([text]) == [prediction] and pipe(text=text) == prediction and pipe([]) == []
    assert all(text[entity["start"] : entity["end"]] == entity["text"] for entity in prediction["entities"])


def test_lines_without_an_id_are_numbered_and_a_bad_line_leaves_the_output_as_it_was(done, tmp_path):
    pipe = pipeline(done("classify")[1])
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"text": "It rained."}\n{"id": "b", "text": "It poured."}\n{"id": 0, "text": "An id."}\n')
    assert predict_file(pipe, source, target) == 3
    assert [row["id"] for row in lines(target)] == ["1", "b", "0"]
    before = target.read_text()
    source.write_text('{"text": "x"}\n{"text": "half \\ud800"}\n')
    with pytest.raises(DataError, match="in.jsonl.*line 2: holds half of a surrogate pair"):
        predict_file(pipe, source, target)
    with pytest.raises(DataError, match="the input itself"):
        predict_file(pipe, source, source)
    assert target.read_text() == before


@pytest.mark.parametrize("given", [{"question": "Who?"}, {"question": "Who?", "context": "  "}, {"text": "x"}])
def test_an_input_that_lacks_a_field_is_refused(done, given):
    with pytest.raises(DataError, match=r"input 1: (context|question) is .*; qa needs question and context"):
        pipeline(done("qa")[1])(given)


def test_only_a_finished_fine_tuned_model_of_the_task_makes_a_pipeline(done, tmp_path):
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    for model, complaint in (
        (done("ner")[1], "was fine-tuned for ner, not for qa"),
        (tmp_path / "run", "not finished"),
    ):
        with pytest.raises(ModelError, match=complaint):
            pipeline(model, task="qa")
    shutil.copytree(done("ner")[1] / "model", tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    for record in (7, {"task": "ner", "options": {"x": 1}}):
        (tmp_path / "model" / "config.json").write_text(json.dumps(config | {TASK: record}))
        with pytest.raises(LabkitError):
            pipeline(tmp_path / "model")
