"""`labkit bench future-attention`: its arms, resuming, and a report that finds what was planted and nothing else."""

import json
import math
import random
import shutil
from dataclasses import replace

import pytest
import torch

from labkit import cross_entropy
from labkit.bench import future_arms, future_study
from labkit.bench.future_arms import DEFAULT, MultiTokenGPT, arm, arms, matched_inner
from labkit.bench.future_report import report, written
from labkit.bench.future_study import PROFILES, Study, flops_per_token, run_folder, run_study, token_losses
from labkit.bench.future_words import verdict
from labkit.errors import DataError, FutureAttentionError, TrainingError
from labkit.future_attention import FutureGPT
from labkit.gpt import GPT, GPTConfig
from labkit.leakage import find_leaks

SHAPE = {"vocab_size": 300, "context": 16, "width": 16, "layers": 1, "heads": 2}
STUDY = Study(
    arms=("baseline", "smaller", "memory:4", "future:cosine:5", "tokens:none:5", "shuffled:mse:5", "multi-token:2"),
    seeds=(0, 1), steps=4, batch_size=4, eval_rows=8, evaluations=2, **SHAPE,
)  # fmt: skip
CONFIG = GPTConfig(**SHAPE)


def quiet(text):
    pass


# -- arms --------------------------------------------------------------------------------------------------------------


def test_arms_are_named_as_they_are_trained():
    each = arm("future:mse-difference:50", 0.5)
    assert (each.loss.kind, each.loss.target, each.loss.weight, each.loss.shuffled) == ("mse", "difference", 0.5, False)
    assert arm("future:mse@1000:50", 0.5, (0,)).loss.weight == 1000 and arm("tokens:kl:5", 1.0, (0,)).loss.layers == (
        0,
    )
    assert arm("shuffled-tokens:cosine@2:50").loss.shuffled
    dropped = arm("dropout:0.2").build(CONFIG, 0).config
    assert (dropped.dropout, dropped.attention_dropout) == (0.2, 0.2)
    assert arm("future:none:50").loss is None and arm("shuffled:cosine:50").loss.shuffled
    assert arm("dropout:0.2").value == 0.2 and arm("memory").value is None and arm("multi-token:2").value == 2
    assert [each.name for each in arms(DEFAULT)] == list(DEFAULT) and DEFAULT[0] == "baseline"


@pytest.mark.parametrize(
    "name",
    ["", "base", "baseline:1", "dropout", "dropout:1.5", "dropout:x", "memory:0", "memory:2.5", "future:50",
     "future:l2:50", "future:cosine:0", "future:kl-difference:5", "shuffled:none:5", "future:none-difference:5",
     "multi-token:0", "tokens:cosine:5:5", "future:cosine:nan", "memory:inf", "future:mse@x:5", "future:mse@-1:5",
     "future:none@2:5"],
)  # fmt: skip
def test_an_arm_that_is_none_is_refused(name):
    with pytest.raises(FutureAttentionError):
        arm(name)


@pytest.mark.parametrize("names", [[], ["future:cosine:5"], ["baseline", "baseline"]])
def test_arms_that_cannot_be_compared_are_refused(names):
    with pytest.raises(FutureAttentionError, match="give each once, and baseline among them"):
        arms(names)


@pytest.mark.parametrize("config", [CONFIG, GPTConfig(2048, 128, 128, 4, 4), GPTConfig(300, 16, 16, 2, 2, inner=40)])
def test_the_baseline_has_as_many_parameters_as_the_model_with_columns(config):
    counts = {
        name: sum(p.numel() for p in arm(name).build(config, 0).parameters())
        for name in ("baseline", "smaller", "future:cosine:5", "memory")
    }
    assert counts["future:cosine:5"] == counts["memory"]
    assert abs(counts["baseline"] - counts["memory"]) <= config.layers * (2 * config.width + 1)
    assert counts["memory"] - counts["smaller"] == config.layers * 2 * config.context * config.width
    assert matched_inner(config) > (config.inner or 4 * config.width)


def test_all_arms_of_a_seed_begin_with_the_same_weights():
    plain = arm("smaller").build(CONFIG, 3).state_dict()
    state = torch.get_rng_state()
    for name in ("baseline", "dropout:0.1", "future:cosine:5", "tokens:none:5", "memory", "multi-token:1"):
        made = arm(name).build(CONFIG, 3).state_dict()
        for key, weight in plain.items():
            own = made[key][tuple(slice(n) for n in weight.shape)]  # the corner that is in the smaller one
            assert torch.equal(own, weight), (name, key)
    wide = arm("baseline").build(CONFIG, 3).state_dict()["h.0.mlp.c_fc.weight"]
    assert wide.shape == (matched_inner(CONFIG), 16) and bool((wide[64:] != 0).all())
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(arm("smaller").build(CONFIG, 4).state_dict()["wte.weight"], plain["wte.weight"])


def test_the_tokens_after_the_next_by_hand():
    model = arm("multi-token:2").build(CONFIG, 0)
    ids = torch.randint(300, (3, 17))
    nats, later = arm("multi-token:2").losses(model, ids[:, :-1], ids[:, 1:])
    hidden = model.hidden(ids[:, :-1])
    expected = []
    for k, layer in enumerate(model.ahead, 1):
        logits = (hidden + layer(hidden)) @ model.wte.weight.T
        expected.append(torch.nn.functional.cross_entropy(logits[:, : 16 - k].flatten(0, 1), ids[:, 1 + k :].flatten()))
    assert later.item() == pytest.approx(torch.stack(expected).mean().item(), rel=1e-5)
    assert nats.item() == pytest.approx(model.loss(ids[:, :-1], ids[:, 1:]).item())
    assert isinstance(model, MultiTokenGPT) and torch.equal(model(ids[:, :5]), model(ids[:, :5]))


def test_arithmetic_is_counted():
    """By hand: 6 per weight of a product and token, and 12 per pair and channel of attention, gradients of inputs of
    the first layer included, as its input is trained too."""
    model = arm("smaller").build(CONFIG, 0)
    rows = cross_entropy.FEW // (300 * 16) + 1  # so many that the loss is computed in pieces, in training
    for count in (2, rows):
        batch = {"input_ids": torch.randint(300, (count, 16)), "targets": torch.randint(300, (count, 16))}
        products = 12 * 16 * 16 + 300 * 16
        assert flops_per_token(arm("smaller"), model, batch) == pytest.approx(6 * products + 12 * 16 * 16, rel=0.02)
    assert cross_entropy.FEW == 2**20 and not model.naive and all(p.grad is None for p in model.parameters())
    more = flops_per_token(arm("future:cosine:5"), arm("future:cosine:5").build(CONFIG, 0), batch)
    assert more > 6 * products + 12 * 16 * 16


@pytest.mark.parametrize("name", DEFAULT)
def test_every_arm_is_causal(name):
    config = GPTConfig(vocab_size=30, context=60, width=16, layers=2, heads=2)
    model = arm(name).build(config, 0)
    ids = torch.randint(30, (2, 60), generator=torch.Generator().manual_seed(0))
    for training in (False, True):
        model.train(training)
        outs = []
        for shift in (0, 7):
            torch.manual_seed(0)  # the same dropout
            outs.append(model(torch.cat([ids[:, :40], (ids[:, 40:] + shift) % 30], dim=1)))
        assert torch.equal(outs[0][:, :40], outs[1][:, :40]) and not torch.equal(*outs)
    assert find_leaks(model.eval()).clean


# -- the study ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    folder = tmp_path_factory.mktemp("future") / "study"
    said = []
    assert run_study(STUDY, folder, say=said.append) == {}
    return folder, said


def without_time(found):
    found = json.loads(json.dumps(found))
    for condition in found["conditions"]:
        for one in condition["arms"]:
            del one["seconds"]
    return found


@pytest.mark.end_to_end
def test_every_run_says_what_it_was_and_nothing_else_is_left(done):
    folder, said = done
    orders = {0: set(), 1: set()}
    assert said[0] == "14 runs, 0 of them done" and len(said) == 15
    for name in STUDY.arms:
        for seed in STUDY.seeds:
            where = folder / run_folder(name, seed)
            assert sorted(each.name for each in where.iterdir()) == [
                "config.json", "losses.json", "metrics.json", "trainer_state.json"
            ]  # fmt: skip
            metrics, losses = (json.loads((where / f"{each}.json").read_text()) for each in ("metrics", "losses"))
            assert len(losses["rows"]) == 8 and len(losses["positions"]) == 16
            mean = sum(losses["rows"]) / 8
            assert metrics["val_loss"] == pytest.approx(mean) == pytest.approx(sum(losses["positions"]) / 16)
            assert metrics["tokens"] == 4 * 4 * 16
            assert ("future_loss" in metrics) == name.startswith(("future", "tokens", "shuffled"))
    orders = {
        seed: {
            json.loads((folder / run_folder(n, seed) / "metrics.json").read_text())["data_order"] for n in STUDY.arms
        }
        for seed in STUDY.seeds
    }
    assert all(len(each) == 1 for each in orders.values()) and orders[0] != orders[1]


@pytest.mark.end_to_end
def test_the_report_comes_from_the_folder_alone(done, tmp_path):
    shutil.copytree(done[0], tmp_path / "study")
    found = report([tmp_path / "study"])
    assert found == report([done[0]])
    (condition,) = found["conditions"]
    assert [one["name"] for one in condition["arms"]] == list(STUDY.arms) and not condition["enough"]
    files = written(found, tmp_path / "out")
    assert files[0].name == "report.md" and all(file.stat().st_size > 500 for file in files)
    text = files[0].read_text()
    assert "no verdict: too few arms or seeds" in text and "| future:cosine:5 | 2 |" in text
    assert {each["kind"] for each in found["curves"]} == {
        "val_loss by tokens",
        "val_loss by flops",
        "future_loss by tokens",
    }


@pytest.mark.end_to_end
def test_a_study_killed_in_a_run_ends_with_the_same_numbers(done, tmp_path, monkeypatch):
    real, calls = future_study._measured, []

    def dies(*args):
        calls.append(1)
        if len(calls) == 8:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(future_study, "_measured", dies)
    with pytest.raises(KeyboardInterrupt):
        run_study(STUDY, tmp_path / "s", say=quiet)
    assert report([tmp_path / "s"])["unfinished"][0]["done"] < 14
    monkeypatch.undo()
    with pytest.raises(TrainingError, match="--resume goes on with it"):
        run_study(STUDY, tmp_path / "s", say=quiet)
    assert run_study(STUDY, tmp_path / "s", resume=True, say=quiet) == {}
    whole = without_time(report([done[0]]))
    again = without_time(report([tmp_path / "s"]))
    for each in (whole, again):
        each["conditions"][0]["name"] = each["words"] = None
        for curve in each["curves"]:
            curve["condition"] = curve["title"] = None
    assert again == whole


@pytest.mark.end_to_end
def test_what_was_read_is_written_down_as_it_is_read(done, tmp_path, monkeypatch):
    """Arms that are given other rows are refused, though both say they were made alike."""
    real = future_study.row_maker

    def shifted(ids, curriculum, seed):
        make = real(ids, curriculum, seed)
        return lambda row: make(row + 1)

    shutil.copytree(done[0], tmp_path / "s")
    shutil.rmtree(tmp_path / "s" / run_folder("smaller", 0))
    monkeypatch.setattr(future_study, "row_maker", shifted)
    assert run_study(STUDY, tmp_path / "s", resume=True, say=quiet) == {}
    with pytest.raises(TrainingError, match="seed 0 did not see the same rows"):
        report([tmp_path / "s"])


@pytest.mark.end_to_end
def test_several_processes_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(future_study, "process_count", lambda: 2)
    with pytest.raises(TrainingError, match="on several GPUs give each a folder"):
        run_study(STUDY, tmp_path / "s", say=quiet)
    assert not (tmp_path / "s").exists()


@pytest.mark.end_to_end
def test_seeds_that_were_run_elsewhere_are_copied_together(done, tmp_path):
    apart = [replace(STUDY, arms=("baseline", "smaller"), seeds=(seed,)) for seed in (0, 1)]
    for study in apart:
        assert run_study(study, tmp_path / f"s{study.seeds[0]}", say=quiet) == {}
    shutil.copytree(tmp_path / "s1" / "runs", tmp_path / "s0" / "runs", dirs_exist_ok=True)
    said = []
    assert run_study(replace(apart[0], seeds=(0, 1)), tmp_path / "s0", resume=True, say=said.append) == {}
    assert said[0] == "4 runs, 4 of them done"
    alone = {one["name"]: one["scores"] for one in report([done[0]])["conditions"][0]["arms"]}
    assert {one["name"]: one["scores"] for one in report([tmp_path / "s0"])["conditions"][0]["arms"]} == {
        name: alone[name] for name in ("baseline", "smaller")
    }


@pytest.mark.end_to_end
def test_arms_and_seeds_can_be_added_and_nothing_else(done, tmp_path):
    shutil.copytree(done[0], tmp_path / "s")
    before = (tmp_path / "s" / run_folder("baseline", 0) / "metrics.json").read_bytes()
    more = replace(STUDY, arms=("baseline", "dropout:0.1"), seeds=(0, 2))
    assert run_study(more, tmp_path / "s", resume=True, say=quiet) == {}
    assert (tmp_path / "s" / run_folder("baseline", 0) / "metrics.json").read_bytes() == before
    found = report([tmp_path / "s"])
    seeds = {one["name"]: one["seeds"] for one in found["conditions"][0]["arms"]}
    assert seeds["baseline"] == [0, 1, 2] and seeds["dropout:0.1"] == [0, 2] and seeds["smaller"] == [0, 1]
    assert found["unfinished"][0]["planned"] == 8 * 3
    for change, message in (({"steps": 5}, "steps was 4, now 5"), ({"weight": 2.0}, "weight was 1.0, now 2.0")):
        with pytest.raises(TrainingError, match=message):
            run_study(replace(STUDY, **change), tmp_path / "s", resume=True, say=quiet)
    text = tmp_path / "other.txt"
    text.write_text("Another text altogether. " * 400)
    with pytest.raises(TrainingError, match="begun on other texts|begun otherwise"):
        run_study(replace(STUDY, texts=(str(text),)), tmp_path / "s", resume=True, say=quiet)


@pytest.mark.end_to_end
def test_a_text_that_is_too_short_is_refused_and_nothing_is_trained(tmp_path):
    text = tmp_path / "short.txt"
    text.write_text("A few words, and no more.")
    with pytest.raises(DataError, match="add text, or take a shorter context"):
        run_study(replace(STUDY, texts=(str(text),)), tmp_path / "s", say=quiet)
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"seeds": ()}, DataError, "at least one"), ({"seeds": (1, 1)}, DataError, "none twice"),
        ({"heads": 3}, FutureAttentionError, "do not divide"), ({"held_out": 1.0}, DataError, "share between 0 and 1"),
        ({"arms": ("baseline", "future:cosine:16")}, FutureAttentionError, "at most 15 others ahead"),
        ({"steps": 0}, TrainingError, "at least 1"), ({"dtype": "float99"}, TrainingError, "choose one of"),
        ({"learning_rate": -1.0}, TrainingError, "must be positive"), ({"vocab_size": 100}, DataError, "256 bytes"),
        ({"arms": ("baseline", "multi-token:16")}, FutureAttentionError, "16 tokens ahead, in a context of 16"),
        ({"batch_size": 1}, FutureAttentionError, "2 or more in a batch"),
        ({"loss_layers": (1,)}, FutureAttentionError, "0 to 0 with columns"),
    ],
)  # fmt: skip
def test_a_study_that_cannot_be_run_is_refused_at_once(change, error, message):
    with pytest.raises(error, match=message):
        replace(STUDY, **change)


def test_the_profile_of_the_origin_is_of_its_size():
    study = Study(**PROFILES["origin"])
    assert 14e6 < sum(p.numel() for p in arm("smaller").build(study.config, 0).parameters()) < 16.5e6
    assert (study.context, study.steps) == (200, 9000)


def test_token_losses_by_hand():
    model = GPT(CONFIG)
    rows = torch.randint(300, (3, 17))
    found = token_losses(model, rows, batch_size=2)
    logits = model(rows[1:2, :-1])
    assert found.shape == (3, 16)
    assert found[1, 4].item() == pytest.approx(-logits[0, 4].log_softmax(-1)[rows[1, 5]].item(), rel=1e-5)
    assert isinstance(arm("memory").build(CONFIG, 0), FutureGPT)


# -- a report of runs that were made up --------------------------------------------------------------------------------


def made_up(folder, losses, seeds=3, rows=64, noise=0.004, same_rows=True):
    """A study whose arms have these losses, with rows of unequal difficulty and seeds of unequal luck."""
    study = {
        "arms": list(losses), "seeds": list(range(seeds)), "context": 6, "width": 8, "layers": 1, "heads": 1,
        "steps": 10, "batch_size": 2, "learning_rate": 1e-3, "dtype": "float32", "weight": 1.0,
    }  # fmt: skip
    folder.mkdir()
    tokens = {"train": 1000, "rows": rows, "vocabulary": 50}
    whole = {"kind": future_study.KIND, "study": study, "texts": {"invented": "0"}, "tokens": tokens}
    (folder / "study.json").write_text(json.dumps(whole))
    hard = random.Random("rows")
    rows_of = [hard.gauss(0, 0.3) for _ in range(rows)]
    for name, loss in losses.items():
        for seed in range(seeds):
            rng = random.Random(f"{name} {seed}")
            of_seed = loss + rng.gauss(0, noise)
            each = [of_seed + r + rng.gauss(0, 0.01) for r in rows_of]
            where = folder / run_folder(name, seed)
            where.mkdir(parents=True)
            metrics = {
                "val_loss": sum(each) / rows, "train_loss": loss - 0.1, "parameters": 100, "flops_per_token": 600.0,
                "seconds": 1.0, "steps": 10, "tokens": 120, "data_order": f"{seed}{'' if same_rows else name}",
            }  # fmt: skip
            (where / "metrics.json").write_text(json.dumps(metrics))
            (where / "losses.json").write_text(json.dumps({"rows": each, "positions": [loss] * 6}))
            history = [{"step": 10, "val_loss": loss}]
            (where / "trainer_state.json").write_text(json.dumps({"log_history": history}))
    return folder


PLANTED = {
    "baseline": 3.42, "future:cosine:50": 3.42, "memory": 3.36, "smaller": 3.50, "dropout:0.1": 3.41,
    "future:none:50": 3.42,
}  # fmt: skip


@pytest.mark.end_to_end
def test_a_planted_gain_is_found_and_a_planted_null_is_not(tmp_path):
    found = report([made_up(tmp_path / "s", PLANTED, seeds=5)])
    gaps = {one["name"]: one.get("difference") for one in found["conditions"][0]["arms"]}
    assert gaps["baseline"] is None and found["conditions"][0]["enough"]
    assert gaps["memory"]["high"] < -0.04 and gaps["smaller"]["low"] > 0.06
    assert gaps["future:cosine:50"]["low"] < 0 < gaps["future:cosine:50"]["high"]
    assert verdict(gaps["memory"]) == "better" and verdict(gaps["smaller"]) == "worse"
    assert verdict(gaps["future:cosine:50"]) == "the same to within 0.02 nats"
    told = "\n".join(found["words"])
    assert ": the same to within 0.02 nats" in told and "memory (0.00 M) -0.0" in told
    pairs = {(pair["one"], pair["other"]): pair["difference"] for pair in found["conditions"][0]["pairs"]}
    assert pairs["future:cosine:50", "memory"]["low"] > 0.03
    assert pairs["future:cosine:50", "future:none:50"]["low"] < 0 < pairs["future:cosine:50", "future:none:50"]["high"]


@pytest.mark.end_to_end
def test_planted_nulls_seldom_leave_out_zero(tmp_path):
    """20 studies of one null each: at 5 % a false alarm in more than 5 has a probability below 0.0004."""
    alarms = 0
    for number in range(20):
        losses = {"baseline": 3.42, f"future:cosine:{number + 1}": 3.42}
        gap = report([made_up(tmp_path / f"s{number}", losses, rows=24)])["conditions"][0]["arms"][1]["difference"]
        alarms += gap["low"] > 0 or gap["high"] < 0
    assert alarms <= 5


@pytest.mark.end_to_end
@pytest.mark.parametrize(
    ("losses", "seeds", "noise", "message"),
    [
        (dict(list(PLANTED.items())[:4]), 3, 0.004, "no verdict: too few arms or seeds"),
        (PLANTED, 2, 0.004, "no verdict: too few arms or seeds"),
        (PLANTED, 3, 0.08, "no verdict: the interval is wider than 0.02 nats"),
    ],
)
def test_without_enough_there_is_no_verdict(tmp_path, losses, seeds, noise, message):
    found = report([made_up(tmp_path / "s", losses, seeds=seeds, noise=noise)])
    assert message in found["words"][0]


def test_verdicts_at_their_edges():
    def of(mean, half):
        return {"mean": mean, "low": mean - half, "high": mean + half}

    assert verdict(of(-0.03, 0.019)) == "better" and verdict(of(0.03, 0.019)) == "worse"
    assert verdict(of(-0.008, 0.004)) == "better, by less than 0.02 nats"
    assert verdict(of(0.0, 0.0199)) == "the same to within 0.02 nats"
    assert verdict(of(0.012, 0.018)).startswith("open")
    assert verdict(of(0.0, 0.021)).startswith("no verdict: the interval")
    assert verdict({"mean": 0.1, "low": None, "high": None}).startswith("no verdict: too few")
    assert verdict(of(-0.03, 0.01) | {"n_seeds": 2}).startswith("no verdict: too few")
    assert verdict(of(-0.03, 0.01) | {"low_together": -0.07, "high_together": 0.01}) == "better, barely"


def test_seeds_that_two_arms_do_not_share_count_for_nothing(tmp_path):
    folder = made_up(tmp_path / "s", PLANTED, seeds=4)
    shutil.rmtree(folder / run_folder("baseline", 0))
    shutil.rmtree(folder / run_folder("memory", 3))
    shutil.rmtree(folder / run_folder("memory", 2))
    (memory,) = [one for one in report([folder])["conditions"][0]["arms"] if one["name"] == "memory"]
    assert memory["difference"]["n_seeds"] == 1


def test_how_far_ahead_makes_a_curve_and_folders_of_one_name_stay_apart(tmp_path):
    losses = PLANTED | {"future:cosine:100": 3.40, "future:cosine:150": 3.39}
    (tmp_path / "a").mkdir()
    found = report([made_up(tmp_path / "s", losses), made_up(tmp_path / "a" / "s", PLANTED)])
    assert [each["name"] for each in found["conditions"]] == ["s", "s, study 2"]
    (curve,) = [each for each in found["curves"] if each["kind"] == "val_loss by future_dim"]
    assert [x for x, _ in curve["lines"]["future:cosine"]] == [50, 100, 150] and list(curve["lines"]) == [
        "future:cosine"
    ]
    assert len(written(found, tmp_path / "out")) == 3 + len(found["curves"])


def test_early_less_late_is_told(tmp_path):
    folder = made_up(tmp_path / "s", PLANTED)
    for seed in range(3):
        file = folder / run_folder("memory", seed) / "losses.json"
        losses = json.loads(file.read_text())
        losses["positions"] = [3.30, 3.30, 3.36, 3.36, 3.42, 3.42]
        file.write_text(json.dumps(losses))
    parts = {part["name"]: part["arms"]["memory"] for part in report([folder])["conditions"][0]["parts"]}
    assert parts["first third of the positions"]["difference"]["mean"] == pytest.approx(-0.12)
    assert parts["last third"]["difference"]["mean"] == pytest.approx(0.0)
    assert parts["first less last third"]["difference"]["mean"] == pytest.approx(-0.12)


def test_arms_that_saw_other_rows_are_not_compared(tmp_path):
    with pytest.raises(TrainingError, match="did not see the same rows in the same order"):
        report([made_up(tmp_path / "s", PLANTED, same_rows=False)])


def test_a_folder_without_a_study_or_a_finished_baseline_has_no_report(tmp_path):
    with pytest.raises(TrainingError, match="holds no study of Future Attention"):
        report([tmp_path])
    folder = made_up(tmp_path / "s", PLANTED)
    shutil.rmtree(folder / "runs" / "baseline")
    with pytest.raises(TrainingError, match="no run of the arm baseline has ended yet"):
        report([folder])


def test_what_is_unfinished_is_said(tmp_path):
    folder = made_up(tmp_path / "s", PLANTED)
    shutil.rmtree(folder / "runs" / "memory")
    shutil.rmtree(folder / run_folder("smaller", 2))
    found = report([folder])
    assert found["unfinished"] == [{"name": "s", "done": 14, "planned": 18, "without": ["memory"]}]
    assert "**Unfinished:** s, 14 of 18 runs (none of memory)." in found["words"]
    assert math.isfinite(found["conditions"][0]["arms"][0]["mean"]) and future_arms.REFERENCE == "baseline"
