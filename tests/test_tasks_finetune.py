"""Fine-tuning from end to end on a tiny model: every task, both masks, kills, LoRA, folds, and what is refused."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

import labkit
from labkit import run_folder
from labkit.datasets import embedded
from labkit.datasets.examples import Labelled, Pair, Sentence
from labkit.datasets.sources import sides
from labkit.errors import DataError, ModelError, TrainingError
from labkit.models import precision
from labkit.models.adapters import TASK
from labkit.models.heads import head_in
from labkit.run_folder import RunFolder, read_json
from labkit.tasks import finetune as finetune_module
from labkit.tasks.adapters import trained_part
from labkit.tasks.crossvalidate import crossvalidate
from labkit.tasks.finetune import beats_baselines, finetune, numbers, require_apart
from labkit.tasks.in_force import put_mask_in_force
from labkit.tasks.order import trained_order
from labkit.tasks.pipeline import pipeline, predict_file
from labkit.tasks.plans import Plan
from labkit.tasks.recipes import RECIPES, Options

pytestmark = pytest.mark.end_to_end

PLAN = Plan(epochs=2.0, batch_size=4, gradient_accumulation=1, learning_rate=1e-3, max_steps=6, evaluate_every=2)
OPTIONS = {
    "qa": Options(max_length=128, doc_stride=64),
    "ner": Options(max_length=128, doc_stride=16),
    "classify": Options(max_length=96),
    "embed": Options(max_length=96),
}


def examples(task: str, split: str = "train", count: int = 12) -> list:
    if task == "embed":
        found = embedded.read("classify", "which-way-round", split)[: 2 * count]
        pairs = zip(found[::2], found[1::2], strict=True)
        return [Pair(f"{a.id}+{b.id}", a.text, b.text, None, f"{split}{k}") for k, (a, b) in enumerate(pairs)]
    name = {"qa": "field-notes", "ner": "field-notes", "classify": "which-way-round"}[task]
    return embedded.read(task, name, split)[:count]


def run(task: str, folder, **choices):
    choices = {"plan": PLAN, "options": OPTIONS[task], "say": lambda text: None} | choices
    choices = {"dev": examples(task, "dev", 6), "test": examples(task, "test", 6)} | choices
    model, train = choices.pop("model", "tiny-gpt2"), choices.pop("train", examples(task))
    return finetune(task, model, train, folder, **choices)


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """task -> (metrics, folder) of a finished run, each made once."""
    made = {}

    def get(task: str):
        if task not in made:
            folder = tmp_path_factory.mktemp(task) / "run"
            made[task] = run(task, folder), folder
        return made[task]

    return get


# -- every task --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", RECIPES)
def test_a_run_leaves_a_model_its_card_predictions_and_metrics(done, task):
    metrics, folder = done(task)
    assert read_json(folder / "metrics.json") == json.loads(json.dumps(metrics))
    asked = {"asked": "bidirectional", "window": "keep", "layers": "all", "readings": 1}
    assert metrics["mask"] == asked | {"measured": "bidirectional", "opened": [0, 1]}
    assert metrics["steps"] == 6 and metrics["best_step"] in (2, 4, 6)
    assert metrics["metric"] in metrics["dev"] and metrics["metric"].removeprefix("best_") in metrics["test"]
    for side in ("dev", "test"):
        lines = (folder / f"predictions.{side}.jsonl").read_text(encoding="utf-8").splitlines()
        assert [json.loads(line)["id"] for line in lines] == [each.id for each in examples(task, side, 6)]
    card = (folder / "model" / "README.md").read_text(encoding="utf-8")
    assert "as measured before training:** bidirectional" in card and "| dev (n = 6) | test (n = 6) |" in card
    assert not list(folder.glob(".writing-*"))


@pytest.mark.parametrize("task", RECIPES)
def test_the_saved_model_has_its_head_mask_labels_and_options(done, task):
    metrics, folder = done(task)
    lm = labkit.load(folder / "model", device="cpu")
    assert labkit.audit(lm.model, quick=True).verdict == "bidirectional"
    assert head_in(lm.model.config).task == RECIPES[task].head_task
    record = getattr(lm.model.config, TASK)
    assert record["task"] == task and record["options"]["max_length"] == OPTIONS[task].max_length
    if metrics["labels"]:
        assert [lm.model.config.id2label[k] for k in range(len(metrics["labels"]))] == metrics["labels"]


@pytest.mark.parametrize("task", RECIPES)
def test_the_pipeline_says_what_the_run_said_at_its_end(done, task):
    _, folder = done(task)
    pipe, asked = pipeline(folder), examples(task, "test", 6)
    fields = {"qa": ("question", "context"), "embed": ("first", "second")}.get(task, ("text",))
    said = pipe([{"id": each.id} | {name: getattr(each, name) for name in fields} for each in asked])
    lines = (folder / "predictions.test.jsonl").read_text(encoding="utf-8").splitlines()
    for now, then in zip(said, map(json.loads, lines), strict=True):
        if task == "ner":  # words of a file may be cut otherwise than those of its text
            assert {"id", "entities", "tags", "probabilities"} == set(now)
            continue
        assert now["id"] == then["id"] and set(now) == set(then)
        for name, value in then.items():
            if isinstance(value, float):
                assert now[name] == pytest.approx(value, abs=1e-4)
            elif isinstance(value, str):
                assert now[name] == value


def test_the_scores_of_the_baselines_stand_beside_those_of_the_model(done):
    assert set(done("qa")[0]["baselines"]["test"]) == {"no_answer", "lexical_overlap"}
    assert set(done("ner")[0]["baselines"]["dev"]) == {"outside", "most_frequent"}
    assert set(done("classify")[0]["baselines"]["dev"]) == {"majority", "bag_of_words"}
    answers = [each.answers for each in examples("qa", "test", 6)]
    without = 100 * sum(not each for each in answers) / 6
    assert done("qa")[0]["baselines"]["test"]["no_answer"] == pytest.approx(without)


@pytest.mark.parametrize(("f1", "better"), [(0.4, True), (0.3, False), (0.2, False)])
def test_a_model_that_is_no_better_than_a_baseline_is_said_to_be_none(f1, better):
    said = []
    baselines = {"dev": {"outside": 0.9}, "test": {"outside": 0.0, "most_frequent": 0.3}}
    metrics = {"metric": "f1", "dev": {"f1": 0.1}, "test": {"f1": f1}, "baselines": baselines}
    assert beats_baselines(metrics, said.append) is better
    assert said == [] if better else "no more than 0.300 of the baseline 'most frequent'" in said[0]
    questions = {"metric": "best_f1", "test": {"f1": f1}, "baselines": {"test": {"no_answer": 0.3}}}
    assert beats_baselines(questions, said.append) is better
    assert beats_baselines(metrics | {"baselines": {"test": {}}}, said.append) is None


def test_the_threshold_of_no_answer_is_chosen_on_dev_and_used_on_test(tmp_path):
    dev = embedded.read("qa", "field-notes", "dev")
    dev = [each for each in dev if not each.answers][:3] + [each for each in dev if each.answers][:3]
    metrics = run("qa", tmp_path / "run", dev=dev)
    options = getattr(labkit.load(tmp_path / "run" / "model").model.config, TASK)["options"]
    assert options["null_threshold"] == metrics["dev"]["best_f1_threshold"] != 0
    assert metrics["metric"] == "best_f1" and "best_f1" not in metrics["test"]
    again = run("qa", tmp_path / "fixed", dev=dev, options=replace(OPTIONS["qa"], null_threshold=1.5))
    assert again["metric"] == "f1" and "best_f1" not in again["dev"]


@pytest.mark.parametrize("task", ["qa", "ner"])
@pytest.mark.parametrize("model", ["tiny-gemma", "tiny-gemma2", "tiny-gemma3", "tiny-llama"])
def test_every_family_is_trained_saved_and_used(tmp_path, task, model):
    head = {"backbone_dropout": 0.1, "init": "xavier"}
    plan = replace(PLAN, max_steps=2, gradient_checkpointing=model == "tiny-gemma3")
    metrics = run(task, tmp_path / "run", model=model, head=head, plan=plan, test=())
    assert metrics["mask"]["measured"] == "bidirectional"
    pipe = pipeline(tmp_path / "run")
    assert type(pipe.lm.model).__name__.startswith({"tiny-llama": "Llama"}.get(model, "Gemma"))
    one = pipe(question="Who left?", context="The ferry left.") if task == "qa" else pipe("The ferry left.")
    assert {"qa": "n_best", "ner": "entities"}[task] in one


def test_where_every_question_has_an_answer_every_question_gets_one(tmp_path):
    train, dev = (
        [each for each in embedded.read("qa", "field-notes", side) if each.answers] for side in ("train", "dev")
    )
    choices = {"train": train[:12], "dev": dev[:6], "test": ()}
    metrics = run("qa", tmp_path / "run", **choices)
    said = [json.loads(line)["text"] for line in (tmp_path / "run" / "predictions.dev.jsonl").read_text().splitlines()]
    assert metrics["metric"] == "f1" and len(said) == 6 and all(said)
    assert pipeline(tmp_path / "run")(question="Who?", context="The ferry left at noon.")["text"]
    run("qa", tmp_path / "shy", **choices, options=replace(OPTIONS["qa"], null_threshold=-1e9))
    assert pipeline(tmp_path / "shy")(question="Who?", context="The ferry left at noon.")["text"] == ""


# -- twins -------------------------------------------------------------------------------------------------------------


def test_twins_differ_in_the_mask_alone(tmp_path, monkeypatch):
    from labkit.tasks import finetune as module

    seen, heads = {}, {}

    def watched(model, make_row, **options):
        seen[mask] = [row.ids for k in range(24) for row in make_row(k)]
        heads[mask] = model.head.weight.detach().clone()
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "train", watched)
    for mask in ("causal", "bidirectional"):
        with pytest.raises(KeyboardInterrupt):
            run("ner", tmp_path / mask, mask=mask)
    assert seen["causal"] == seen["bidirectional"]
    assert torch.equal(heads["causal"], heads["bidirectional"])


def test_a_causal_run_is_causal_and_measured(tmp_path):
    metrics = run("classify", tmp_path / "run", mask="causal")
    assert metrics["mask"]["measured"] == "causal"
    assert labkit.audit(labkit.load(tmp_path / "run" / "model").model, quick=True).verdict == "causal"


def test_a_mask_that_is_not_the_one_asked_for_trains_nothing(monkeypatch, tmp_path):
    monkeypatch.setattr(labkit, "to_bidirectional", lambda model, **options: model)  # a conversion that does nothing
    with pytest.raises(TrainingError, match="was to be bidirectional, and the one measured is causal: nothing was"):
        run("ner", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_some_layers_only(tmp_path):
    lm = labkit.load("tiny-gpt2", task="token-classification")
    found = put_mask_in_force(lm.model, "bidirectional", layers="0")
    assert found["layers"] == "0" and found["measured"] not in ("causal", None)


# -- methods -----------------------------------------------------------------------------------------------------------


def weights(folder) -> dict[str, torch.Tensor]:
    return dict(labkit.load(folder, device="cpu").model.named_parameters())


def test_a_mask_is_proved_in_16_bits_where_the_kernel_knows_no_others(monkeypatch):
    """A stand-in for flash attention's kernel, which needs a GPU: it refuses 32-bit numbers, as the real one does."""
    from transformers.integrations import flash_attention

    def kernel(query, key, value, mask, *, is_causal, target_dtype, **_):
        if query.dtype == torch.float32 and target_dtype in (None, torch.float32):
            raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
        heads = [each.transpose(1, 2) for each in (query, key, value)]
        seen = torch.ones(query.shape[1], key.shape[1], dtype=torch.bool)
        seen = (seen.tril() if is_causal else seen)[None, None]
        seen = seen if mask is None else seen & mask[:, None, None, :].bool()  # as flash takes it: 1 at real tokens
        found = torch.nn.functional.scaled_dot_product_attention(*heads, attn_mask=seen, enable_gqa=True)
        return found.transpose(1, 2)

    monkeypatch.setattr(flash_attention, "_flash_attention_forward", kernel)
    model = labkit.load("tiny-llama", task="token-classification", dtype="float32").model
    model.config._attn_implementation = "flash_attention_2"
    assert put_mask_in_force(model, "causal")["measured"] == "causal"
    assert put_mask_in_force(model, "bidirectional")["measured"] == "bidirectional"


def test_weights_in_sixteen_bits_leave_the_frequencies_of_rope_as_they_are():
    lm = labkit.load("tiny-gemma3", task="question-answering", dtype="float32")
    before = {name: each.clone() for name, each in lm.model.named_buffers()}
    trained = trained_part(lm.model, "frozen", dtype="bfloat16")
    after = dict(trained.named_buffers())
    assert any("inv_freq" in name for name in before) and trained.backbone.dtype == torch.bfloat16
    assert all(after[name].dtype == each.dtype and torch.equal(after[name], each) for name, each in before.items())
    assert trained.head.weight.dtype == torch.float32


@pytest.mark.parametrize("method", ["full", "lora", "frozen"])
def test_what_is_trained_changes_and_what_is_not_stays(tmp_path, method):
    metrics = run("classify", tmp_path / "run", method=method, head={"pooling": "attention_query"})
    before = dict(labkit.load("tiny-gpt2", device="cpu").model.transformer.named_parameters())
    after = weights(tmp_path / "run" / "model")
    body = {name.removeprefix("transformer."): p for name, p in after.items() if name.startswith("transformer.")}
    changed = {name for name in before if not torch.equal(before[name], body[name])}
    matrices = {name for name in before if name.startswith("h.") and name.endswith(("c_attn.weight", "c_fc.weight"))}
    assert changed >= matrices if method != "frozen" else not changed
    assert ("wte.weight" in changed) is (method == "full")
    own = sum(p.numel() for name, p in after.items() if not name.startswith("transformer."))
    if method == "frozen":
        assert metrics["trained_parameters"] == own
    assert all(p.dtype == torch.float32 for name, p in after.items() if not name.startswith("transformer."))


def test_an_adapter_alone_is_the_whole_model_again(tmp_path):
    options = replace(OPTIONS["qa"], prompt="evidence", order="question-last", max_length=256, doc_stride=128)
    given = {"train": embedded.read("qa", "evidence", "train")[:12], "dev": embedded.read("qa", "evidence", "dev")[:6]}
    run("qa", tmp_path / "run", method="lora", rank=4, options=options, test=(), **given)
    folder = tmp_path / "run" / "adapter"
    one, whole = pipeline(folder), pipeline(tmp_path / "run")
    assert labkit.audit(one.lm.model, quick=True).verdict == "bidirectional"
    for name, weight in whole.lm.model.named_parameters():
        torch.testing.assert_close(dict(one.lm.model.named_parameters())[name], weight, rtol=0, atol=1e-6)
    asked = {"question": "having no energy", "context": embedded.posts("test")[0].text}
    assert one(asked)["probability"] == pytest.approx(whole(asked)["probability"], abs=1e-4)
    assert sum(file.stat().st_size for file in folder.iterdir()) < 200_000
    assert str(tmp_path) not in (folder / "adapter_config.json").read_text()
    continued = run(
        "qa", tmp_path / "more", train=given["train"], dev=given["dev"], test=(), options=options, model=folder
    )
    assert continued["mask"]["measured"] == "bidirectional"
    with pytest.raises(ModelError, match=r"is for question-answering \(no labels\), not for token-classification"):
        labkit.load(folder, task="token-classification")
    record, own = "labkit_adapter.json", "adapter_config.json"
    for file, change in [
        (record, {"head": 7}), (record, {"conversion": {"layers": "x"}}), (record, {"marks": 7}), (record, {"base": 7}),
        (own, {"r": "x"}), (own, {"peft_type": "NO"}), (own, {"target_modules": ["x"]}),
        ("adapter_model.safetensors", {}),
    ]:  # fmt: skip
        content = (folder / file).read_bytes()
        (folder / file).write_text(json.dumps(json.loads(content) | change) if file.endswith("json") else "")
        with pytest.raises(labkit.LabkitError):
            pipeline(folder)
        (folder / file).write_bytes(content)


def test_a_head_without_weights_cannot_be_trained_alone(tmp_path):
    with pytest.raises(TrainingError, match="frozen: this head has no weights of its own"):
        run("embed", tmp_path / "run", method="frozen")
    with pytest.raises(TrainingError, match="method is 'half'; choose one of full, lora, frozen"):
        run("ner", tmp_path / "run", method="half")
    assert not (tmp_path / "run").exists()


# -- the evidence prompt -----------------------------------------------------------------------------------------------


def test_the_evidence_prompt_adds_its_marks_as_tokens_that_start_as_the_mean(tmp_path):
    from labkit.datasets.evidence import MARKS
    from labkit.tasks.special_tokens import add_tokens

    lm = labkit.load("tiny-gpt2", device="cpu")
    before = lm.model.get_input_embeddings().weight.detach().clone()
    assert add_tokens(lm.model, lm.tokenizer, MARKS) == len(MARKS)
    table = lm.model.get_input_embeddings().weight.detach()
    torch.testing.assert_close(table[: len(before)], before, rtol=0, atol=0)
    torch.testing.assert_close(table[len(before) :], before.mean(0).expand(len(MARKS), -1))
    assert add_tokens(lm.model, lm.tokenizer, MARKS) == 0
    assert len(lm.tokenizer("[POST]x[/POST]", add_special_tokens=False)["input_ids"]) == 3


# -- kills and resumes -------------------------------------------------------------------------------------------------

_KILLED = """
    import os, signal, sys
    from labkit.tasks import recipes
    from tests.test_tasks_finetune import run

    calls, plain = [], recipes.RECIPES["ner"].loss

    def loss(model, batch):
        calls.append(1)
        if len(calls) == int(sys.argv[2]):
            os.kill(os.getpid(), signal.SIGKILL)
        return plain(model, batch)

    object.__setattr__(recipes.RECIPES["ner"], "loss", loss)
    run("ner", sys.argv[1])
"""


@pytest.mark.skipif(sys.platform == "win32", reason="SIGKILL is for POSIX systems")
def test_a_run_that_was_killed_goes_on_and_ends_with_the_same_metrics(done, tmp_path):
    expected, folder = done("ner")
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(_KILLED))
    command = [sys.executable, str(script), str(tmp_path / "run"), "7"]  # one call measures the memory, then steps
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([os.getcwd(), *sys.path])}
    killed = subprocess.run(command, env=environment, capture_output=True, timeout=300)
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()[-2000:]
    assert RunFolder(tmp_path / "run").latest_checkpoint()[1]["step"] == 4
    said = []
    metrics = run("ner", tmp_path / "run", resume=True, say=said.append)
    assert any(line.startswith("resuming from step 4 of 6") for line in said)
    timing = ("seconds", "tokens_per_second", "peak_memory_bytes")
    assert {k: v for k, v in metrics.items() if k not in timing} == {
        k: v for k, v in expected.items() if k not in timing
    }
    one, other = weights(folder / "model"), weights(tmp_path / "run" / "model")
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("method", ["full", "lora"])
def test_after_a_full_memory_the_run_goes_on_with_gradient_checkpointing_as_its_error_advises(
    tmp_path, monkeypatch, method
):
    run("ner", tmp_path / "whole", method=method)
    recipe, calls = RECIPES["ner"], []

    def too_much_at_the_end(*args):
        calls.append(None)
        if len(calls) == 6:  # one call measures the memory, then steps
            raise torch.OutOfMemoryError("CUDA out of memory")
        return recipe.loss(*args)

    with monkeypatch.context() as patched:
        patched.setitem(RECIPES, "ner", replace(recipe, loss=too_much_at_the_end))
        with pytest.raises(TrainingError, match="--resume goes on .* with gradient checkpointing"):
            run("ner", tmp_path / "run", method=method)
    said = []
    plan = replace(PLAN, gradient_checkpointing=True)
    run("ner", tmp_path / "run", method=method, resume=True, plan=plan, say=said.append)
    assert any(line.startswith("resuming from step 4 of 6") for line in said)
    one, other = weights(tmp_path / "whole" / "model"), weights(tmp_path / "run" / "model")
    assert all(torch.allclose(one[name], other[name], atol=1e-6) for name in one)


@pytest.fixture
def refused(tmp_path, monkeypatch):
    """What is said of examples that are refused before the training, which leaves no folder."""
    monkeypatch.setattr("labkit.tasks.finetune.train", lambda *args, **kwargs: pytest.fail("it was trained"))
    where = tmp_path / "run"

    def complaint(task, train, dev, test, options=None):
        options = options or OPTIONS[task]
        with pytest.raises(DataError) as raised:
            finetune(task, "tiny-gpt2", train, where, dev=dev, test=test, plan=PLAN, options=options, say=print)
        assert not where.exists()
        return str(raised.value)

    return complaint


def test_pairs_that_no_score_can_be_made_of_are_refused_before_the_training(refused):
    scored = [Pair(str(k), f"the tide {k}", f"a boat {k}", k / 12) for k in range(12)]
    unscored = [replace(each, id=f"u{each.id}", score=None) for each in scored]
    alike = [replace(each, id=f"s{each.id}", score=1.0) for each in scored]
    given = ("embed", scored[:8], scored[8:])
    assert "one has pairs with scores and the other" in refused(*given, unscored)
    assert "nothing to correlate" in refused(*given, alike)


def test_examples_that_could_not_be_scored_are_refused_before_the_training(refused):
    train, dev, test = (examples("qa", side, 4) for side in ("train", "dev", "test"))
    half = replace(test[0], question="who \ud83d?")
    assert "half of a surrogate pair" in refused("qa", train, dev, [half])


@pytest.mark.parametrize("task", ["ner", "classify"])
def test_a_row_with_more_tokens_than_the_model_has_positions_is_refused_before_the_training(refused, task):
    train, dev, test = (examples(task, side, 4) for side in ("train", "dev", "test"))
    if task == "ner":
        words = ["tide"] * 3000
        long = Sentence.of_words("long", words, ["O"] * len(words))
    else:
        long = Labelled("long", "tide " * 3000, test[0].label)
    options = replace(OPTIONS[task], max_length=2000)
    complaint = r"the longest row has 2,000 tokens, and tiny-gpt2 has [\d,]+ positions; give --max-length \d+$"
    assert re.search(complaint, refused(task, train, dev, [*test, long], options))


def test_texts_without_a_word_are_trained_on_and_have_one_baseline_less(tmp_path):
    faces = [Labelled(str(k), "\U0001f600" if k % 2 else "\U0001f641", "glad" if k % 2 else "sad") for k in range(24)]
    said = []
    plan = replace(PLAN, max_steps=2)
    found = finetune(
        "classify", "tiny-gpt2", faces[:16], tmp_path / "run", dev=faces[16:20], test=faces[20:], plan=plan,
        options=OPTIONS["classify"], say=said.append,
    )  # fmt: skip
    assert found["baselines"] == {"dev": {"majority": 0.5}, "test": {"majority": 0.5}}
    assert "the training texts hold no word, so there is no bag of words to compare with" in said


def test_a_file_that_cannot_be_written_is_one_error_and_the_run_goes_on(tmp_path, monkeypatch):
    write = run_folder.write_whole

    def full(path, content):
        if path.name == "predictions.dev.jsonl":
            raise OSError(28, "No space left on device", str(path))
        write(path, content)

    with monkeypatch.context() as patched:
        patched.setattr(run_folder, "write_whole", full)
        with pytest.raises(
            TrainingError, match=r"predictions\.dev\.jsonl could not be written: No space left.*--resume"
        ):
            run("ner", tmp_path / "run")
    assert run("ner", tmp_path / "run", resume=True)["steps"] == PLAN.max_steps


def test_a_run_that_another_command_finished_meanwhile_is_given_back(done, tmp_path, monkeypatch):
    metrics, folder = done("ner")
    check, asked = RunFolder.check.__func__, []

    def before_the_other_was_done(cls, *args, **kwargs):
        asked.append(check(cls, *args, **kwargs))
        return RunFolder(tmp_path / "nothing here") if len(asked) == 1 else asked[-1]

    monkeypatch.setattr(RunFolder, "check", classmethod(before_the_other_was_done))
    monkeypatch.setattr("labkit.tasks.finetune.train", lambda *args, **kwargs: pytest.fail("it was trained"))
    assert run("ner", folder, resume=True) == json.loads(json.dumps(metrics))


def test_a_finished_run_is_not_trained_again(done, tmp_path):
    metrics, folder = done("ner")
    said = []
    assert run("ner", folder, resume=True, say=said.append) == json.loads(json.dumps(metrics))
    assert said == [f"{folder} is finished: 6 steps"]
    with pytest.raises(TrainingError, match="holds a run already: --resume goes on"):
        run("ner", folder)
    with pytest.raises(TrainingError, match=r"another configuration: .*plan.seed was 0, now 1"):
        run("ner", folder, resume=True, plan=replace(PLAN, seed=1))


# -- folds -------------------------------------------------------------------------------------------------------------


def test_folds_score_every_example_once_and_give_means_with_intervals(tmp_path):
    given = embedded.read("classify", "which-way-round", "train")[:36]
    plan = replace(PLAN, max_steps=2)
    choices = {"k": 3, "plan": plan, "options": OPTIONS["classify"], "say": lambda text: None}
    metrics = crossvalidate("classify", "tiny-gpt2", given, tmp_path / "run", **choices)
    scored = [
        json.loads(line)["id"]
        for n in (1, 2, 3)
        for line in (tmp_path / "run" / f"fold-{n}" / "predictions.test.jsonl").read_text().splitlines()
    ]
    assert sorted(scored) == sorted(each.id for each in given)
    assert metrics["n_per_fold"] == [12, 12, 12]
    each = metrics["scores"]["accuracy"]
    assert each["mean"] == pytest.approx(sum(each["folds"]) / 3) and each["half_width_95"] >= 0
    assert crossvalidate("classify", "tiny-gpt2", given, tmp_path / "run", resume=True, **choices) == json.loads(
        json.dumps(metrics)
    )


def test_a_fold_that_was_broken_off_is_gone_on_with(tmp_path, monkeypatch):
    from labkit.tasks import crossvalidate as module

    given = embedded.read("classify", "which-way-round", "train")[:36]
    choices = {"k": 3, "plan": replace(PLAN, max_steps=2), "options": OPTIONS["classify"], "say": lambda text: None}
    expected = crossvalidate("classify", "tiny-gpt2", given, tmp_path / "whole", **choices)
    folders, plain = [], module.finetune

    def breaks_off(task, model, rest, folder, **options):
        folders.append(folder.name)
        if len(folders) == 2:
            raise KeyboardInterrupt
        return plain(task, model, rest, folder, **options)

    with monkeypatch.context() as patched:
        patched.setattr(module, "finetune", breaks_off)
        with pytest.raises(KeyboardInterrupt):
            crossvalidate("classify", "tiny-gpt2", given, tmp_path / "run", **choices)
    metrics = crossvalidate("classify", "tiny-gpt2", given, tmp_path / "run", resume=True, **choices)
    assert metrics["scores"] == expected["scores"]


# -- what is refused, and what is said ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "error", "complaint"),
    [
        ({"train": []}, DataError, "there are no training examples"),
        ({"mask": "prefix"}, TrainingError, "mask is 'prefix'; choose one of bidirectional, causal"),
        ({"options": Options(order="question-last")}, DataError, "ner has no order; it has max length, doc stride"),
        ({"plan": replace(PLAN, dtype="float16")}, TrainingError, "float16 needs a GPU"),
        ({"dev": examples("ner", "train", 3)}, DataError, "groups are in train and in dev too"),
        ({"test": examples("ner", "dev", 3)}, DataError, "groups are in dev and in test too"),
        ({"plan": replace(PLAN, report_to="nothing_like_it")}, LookupError, "not installed"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_anything_is_written(tmp_path, change, error, complaint):
    kind = labkit.LabkitError if error is LookupError else error
    with pytest.raises(kind, match=complaint):
        run("ner", tmp_path / "run", **change)
    assert not (tmp_path / "run").exists()


def test_an_unknown_task_is_refused():
    with pytest.raises(DataError, match="the task is 'sum'; choose one of qa, ner, classify, embed"):
        finetune("sum", "tiny-gpt2", examples("ner"), "nowhere")


def test_without_a_dev_set_a_part_is_held_out_and_said(tmp_path):
    said = []
    metrics = run("classify", tmp_path / "run", dev=(), train=examples("classify", "train", 30), say=said.append)
    assert said[0] == "no dev set: 3 examples are held out, 27 are trained on"
    assert (metrics["n_dev"], metrics["n_train"]) == (3, 27)


def test_memory_is_estimated_before_the_run_and_too_little_is_refused_with_advice(tmp_path, monkeypatch):
    from labkit.tasks import needs

    said = []
    run("classify", tmp_path / "run", say=said.append)
    assert any("needs about" in line and "GB at batch 4 x " in line and "GB are free" in line for line in said)
    monkeypatch.setattr(needs.memory, "available_bytes", lambda device: 0)
    with pytest.raises(
        TrainingError, match=r"--batch-size 2 --gradient-accumulation 2, --gradient-checkpointing, .*--method lora"
    ):
        run("classify", tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_too_little_memory_for_a_batch_of_tokens_is_advice_on_tokens(tmp_path, monkeypatch):
    from labkit.tasks import needs

    monkeypatch.setattr(needs.memory, "available_bytes", lambda device: 0)
    with pytest.raises(TrainingError, match=r"at batch 96 tokens, .*try --batch-tokens 48, --gradient-checkpointing"):
        run("ner", tmp_path / "run", plan=replace(PLAN, batch_tokens=96), packing=True)


def test_a_batch_of_tokens_that_may_hold_one_pair_alone_is_refused_before_anything_is_done(tmp_path):
    with pytest.raises(TrainingError, match="one pair alone"):
        run("embed", tmp_path / "run", plan=replace(PLAN, batch_tokens=96), packing=True)
    assert not (tmp_path / "run").exists()


# -- the pipeline ------------------------------------------------------------------------------------------------------


def test_one_text_gives_one_answer_and_a_list_a_list(done):
    pipe = pipeline(done("ner")[1])
    text = "Dessin went bankrupt in May."
    one = pipe(text)
    assert pipe([text]) == [one] and pipe(text=text) == one and pipe([]) == []
    assert all(text[each["start"] : each["end"]] == each["text"] for each in one["entities"])
    assert "ner" in repr(pipe)


def test_spans_are_of_the_text_as_it_was_given(done):
    context = "  The \u200bferry\u00a0 left 🚢🏽‍♂️ at  noon,\n\n because the tide was low.  "
    answer = pipeline(done("qa")[1])(question="When did it leave?", context=context)
    assert answer["text"] == context[answer["start"] : answer["end"]]
    for each in answer["n_best"]:
        assert each["text"] == context[each["start"] : each["end"]]


@pytest.mark.parametrize("given", [{"question": "Who?"}, {"question": "Who?", "context": "  "}, {"text": "x"}])
def test_an_input_that_lacks_something_is_named(done, given):
    with pytest.raises(DataError, match=r"input 1: (context|question) is .*; qa needs question and context"):
        pipeline(done("qa")[1])(given)


@pytest.mark.parametrize("row", [{"text": "half \ud800"}, {"id": "half \udfff", "text": "x"}])
def test_half_of_a_surrogate_pair_is_refused_with_its_place(done, tmp_path, row):
    (tmp_path / "in.jsonl").write_text(json.dumps({"text": "x"}) + "\n" + json.dumps(row) + "\n")
    with pytest.raises(DataError, match=rf"in.jsonl, line 2: {next(iter(row))} holds half of a surrogate pair"):
        predict_file(pipeline(done("classify")[1]), tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize(
    "record",
    [
        7,
        {},
        {"task": "ner"},
        {"task": "ner", "options": 7},
        {"task": "ner", "options": {"max_length": "x"}},
        {"task": []},
    ],
)
def test_a_record_of_another_form_is_one_clear_error(done, tmp_path, record):
    shutil.copytree(done("ner")[1] / "model", tmp_path / "model")
    config = tmp_path / "model" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"labkit_task": record}))
    with pytest.raises(ModelError):
        pipeline(tmp_path / "model")


def test_files_in_and_out(done, tmp_path):
    pipe = pipeline(done("classify")[1])
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"text": "It rained."}\n{"id": "b", "text": "The bank has failed.", "other": 1}\n')
    with source.open("a") as more:
        more.write('{"id": null, "text": "No id."}\n{"id": 0, "text": "An id."}\n')
    assert predict_file(pipe, source, target) == 4
    assert [json.loads(line)["id"] for line in target.read_text().splitlines()] == ["1", "b", "3", "0"]
    before = target.read_text()
    source.write_text('{"text": "It rained."}\n{"text": ""}\n')
    with pytest.raises(DataError, match=r"in.jsonl.*line 2.*text is ''; classify needs text"):
        predict_file(pipe, source, target)
    assert target.read_text() == before
    with pytest.raises(DataError, match="a folder, or the input itself"):
        predict_file(pipe, source, source)


def test_a_model_that_is_no_fine_tuned_one_is_said_to_be_none(done, tmp_path):
    with pytest.raises(ModelError, match="was not fine-tuned for a task by labkit"):
        pipeline("tiny-gpt2")
    with pytest.raises(ModelError, match="was fine-tuned for ner, not for qa"):
        pipeline(done("ner")[1], task="qa")
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    with pytest.raises(ModelError, match="is not finished: go on with it"):
        pipeline(tmp_path / "run")


def test_sides_from_files_that_number_their_documents_are_not_taken_for_one(tmp_path):
    names = {"train": "Ann", "dev": "Bea", "test": "Cyd"}
    for side, name in names.items():
        lines = "".join(f"-DOCSTART- -X- O O\n\n{name} NNP B-PER\nsleeps VBZ O\n\n" for _ in range(3))
        (tmp_path / f"{side}.conll").write_text(lines)
    read = sides("ner", **{f"{side}_file": str(tmp_path / f"{side}.conll") for side in names})
    assert [{each.group for each in side} for side in read] == [{"document 1", "document 2", "document 3"}] * 3
    assert require_apart(*read) is None
    named = [[replace(each, group="the Dispatch") for each in side] for side in read]
    with pytest.raises(DataError, match="1 groups are in train and in dev too, 'group the Dispatch'"):
        require_apart(*named)
    with pytest.raises(DataError, match="dev and test are the same 3 examples"):
        require_apart(read[0], read[1], list(read[1]))
    assert require_apart(read[0], read[1], []) is None


# -- packed rows, and the controls of comparisons ----------------------------------------------------------------------


def losses(folder) -> list[float]:
    return [entry["loss"] for entry in read_json(folder / "trainer_state.json")["log_history"] if "loss" in entry]


@pytest.mark.parametrize("task", RECIPES)
def test_packed_batches_have_the_losses_and_scores_of_the_same_batches_padded(task, tmp_path, monkeypatch):
    head = {"dropout": 0.0}
    packed = run(task, tmp_path / "packed", packing=True, head=head)
    monkeypatch.setattr(
        "labkit.tasks.finetune.trained_order", lambda *a, packed, **b: trained_order(*a, packed=True, **b)
    )
    padded = run(task, tmp_path / "padded", head=head)
    assert (packed["packing"], padded["packing"]) == (True, False)
    assert packed["data_order"] == padded["data_order"]
    assert losses(tmp_path / "packed") == pytest.approx(losses(tmp_path / "padded"), abs=1e-4)
    assert numbers(packed["test"]) == pytest.approx(numbers(padded["test"]), abs=1e-3, nan_ok=True)


def test_batches_of_tokens_are_packed_as_full_as_they_go(tmp_path):
    said = []
    plan = replace(PLAN, batch_tokens=96, max_steps=None, epochs=1.0)
    metrics = run("ner", tmp_path / "run", plan=plan, packing=True, say=said.append)
    lengths = [
        RECIPES["ner"].length_of(row)
        for row in RECIPES["ner"].features(
            labkit.load("tiny-gpt2").tokenizer,
            examples("ner"),
            metrics["labels"],
            OPTIONS["ner"].filled(RECIPES["ner"]),
            said.append,
        )
    ]
    assert sum(lengths) / 96 <= metrics["steps"] < len(lengths)


def test_batches_of_tokens_need_packed_rows(tmp_path):
    with pytest.raises(TrainingError, match="batches of 96 tokens are for packed rows"):
        run("ner", tmp_path / "run", plan=replace(PLAN, batch_tokens=96))


def test_what_cannot_be_packed_is_said_and_grouped_by_length(tmp_path, monkeypatch):
    monkeypatch.setattr("labkit.tasks.finetune.why_not", lambda model: "its positions are odd")
    said = []
    metrics = run("ner", tmp_path / "run", packing=True, say=said.append)
    assert metrics["packing"] is False
    assert "rows are not packed but grouped by length: its positions are odd" in said


def test_layers_that_measure_otherwise_than_chosen_stop_the_run(tmp_path, monkeypatch):
    real = labkit.to_bidirectional
    monkeypatch.setattr(labkit, "to_bidirectional", lambda model, layers, **more: real(model, layers=[1], **more))
    with pytest.raises(TrainingError, match=r"removed in layers \[0\], and it measures so in \[1\]: nothing trained"):
        run("ner", tmp_path / "run", layers="0", keep_model=False)


def test_a_new_head_begins_alike_wherever_the_model_comes_from_and_a_trained_one_stays(tmp_path):
    built = run("ner", tmp_path / "built", keep_model=True)
    labkit.load("tiny-gpt2").model.save_pretrained(tmp_path / "files")
    labkit.load("tiny-gpt2").tokenizer.save_pretrained(tmp_path / "files")
    read = run("ner", tmp_path / "read", model=tmp_path / "files", keep_model=False)
    assert built["head_start"] == read["head_start"]
    other = run("ner", tmp_path / "other", plan=replace(PLAN, seed=PLAN.seed + 1), keep_model=False)
    assert other["head_start"] != built["head_start"]
    trained = labkit.load(tmp_path / "built" / "model").model
    assert not trained.head_is_new
    again = run("ner", tmp_path / "again", model=tmp_path / "built" / "model", keep_model=False)
    assert again["head_start"] == trained.head_sha256() != built["head_start"]


def test_new_adapters_start_from_the_seed_whatever_was_drawn_before(tmp_path):
    first = run("ner", tmp_path / "first", method="lora", keep_model=False)
    torch.rand(7)
    again = run("ner", tmp_path / "again", method="lora", mask="causal", keep_model=False)
    assert again["adapters_start"] == first["adapters_start"] is not None
    twin = run("ner", tmp_path / "twin", method="lora", keep_model=False)
    assert twin["dev"] == first["dev"] and twin["test"] == first["test"]
    other = run("ner", tmp_path / "other", method="lora", plan=replace(PLAN, seed=PLAN.seed + 1), keep_model=False)
    assert other["adapters_start"] != first["adapters_start"]
    assert run("ner", tmp_path / "whole", keep_model=False)["adapters_start"] is None


@pytest.mark.parametrize("method", ["full", "lora"])
def test_a_run_killed_while_it_is_scored_is_scored_in_the_same_precision(tmp_path, monkeypatch, method):
    given = {"method": method, "plan": replace(PLAN, dtype="bfloat16"), "keep_model": False}
    logits, real = [], finetune_module.evaluating

    @contextmanager
    def noting(model):
        with real(model) as best:
            logits.append(best(torch.arange(12)[None], torch.ones(1, 12, dtype=torch.long)).logits)
            yield best

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(finetune_module, "evaluating", noting)
    expected = run("ner", tmp_path / "whole", **given)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(finetune_module, "_scored", killed)
        run("ner", tmp_path / "run", **given)
    ended = run("ner", tmp_path / "run", resume=True, **given)
    assert logits[0].dtype == logits[2].dtype and torch.equal(logits[0], logits[2])
    assert ended["dev"] == expected["dev"] and ended["test"] == expected["test"] and ended["steps"] == 6


@pytest.mark.parametrize("method", ["full", "lora"])
def test_a_run_goes_on_in_its_numbers_where_the_rule_has_others(tmp_path, monkeypatch, method):
    def killed(*_):
        raise KeyboardInterrupt

    given, said = {"method": method, "keep_model": False}, []
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        another_card = precision.Precision("bfloat16", False, "as on another card")
        patched.setattr(precision, "choose", lambda *_: another_card)
        patched.setattr(finetune_module, "_scored", killed)
        run("ner", tmp_path / "run", **given)
    ended = run("ner", tmp_path / "run", resume=True, say=said.append, **given)
    assert ended["dtype"] == "bfloat16" and ended["steps"] == 6
    assert "computing in bfloat16, as this run was begun; on this machine a new one would take float32" in said
    asked = replace(PLAN, dtype="bfloat16")
    assert ended["dev"] == run("ner", tmp_path / "asked", plan=asked, **given)["dev"]


@pytest.mark.parametrize(
    ("choices", "measured"),
    [
        ({"mask": "right-to-left"}, {"asked": "right-to-left", "measured": "right-to-left", "readings": 1}),
        ({"mask": "causal", "readings": 2}, {"asked": "causal", "measured": "causal", "readings": 2, "opened": []}),
    ],
)
@pytest.mark.parametrize("model", ["tiny-gpt2", "tiny-gemma3"])
def test_controls_are_trained_and_leave_scores_and_no_model(choices, measured, model, tmp_path):
    metrics = run("ner", tmp_path / "run", model=model, keep_model=False, packing=True, **choices)
    assert metrics["mask"] == {"window": "keep", "layers": "all"} | measured
    assert (tmp_path / "run" / "judged.test.jsonl").exists() and not (tmp_path / "run" / "model").exists()


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"mask": "right-to-left"}, "a right-to-left mask is a control for comparisons"),
        ({"mask": "causal", "readings": 2}, "a repeated input is a control for comparisons"),
        ({"mask": "causal", "readings": 0}, "read 0 times"),
        ({"mask": "causal", "layers": "0"}, "layers are chosen for the bidirectional mask"),
    ],
)
def test_a_control_cannot_be_kept_as_a_model(choices, message, tmp_path):
    with pytest.raises(TrainingError, match=message):
        run("ner", tmp_path / "run", **choices)
    assert not (tmp_path / "run").exists()
