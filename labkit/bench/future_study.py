"""Does Future Attention help? The same small GPT trained by arms, over seeds, resumable run by run and within a run.

    run_study(Study(arms=("baseline", "future:cosine:50", "memory"), seeds=(0, 1, 2)), "runs/future")
    report(["runs/future"])                      # labkit.bench.future_report

All arms of a seed read the same rows in the same order, which is written down as it is read, and begin with the same
weights wherever they have the same matrices. The held-out text is the last share of each text; its rows are the same
for every arm and seed.

    study.json                            what all runs share: shape, budget, texts by sha256
    tokenizer/                            a byte-level BPE of the training side
    runs/ARM/seed-N/metrics.json          losses, parameters, FLOPs; written last
    runs/ARM/seed-N/losses.json           the final loss of each held-out row, and by position in the row
    failures.json                         what failed in the last pass, and why
"""

from __future__ import annotations

import hashlib
import math
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from labkit import cross_entropy
from labkit.bench import folders
from labkit.bench.future_arms import DEFAULT, Arm, arms
from labkit.datasets.text import Document, read_documents
from labkit.errors import DataError, FutureAttentionError, LabkitError, TrainingError
from labkit.future_attention import FutureGPT
from labkit.future_losses import FutureLoss
from labkit.gpt import GPT, GPTConfig
from labkit.pretraining import encode_all, train_tokenizer
from labkit.pretraining_rows import Curriculum, row_maker
from labkit.resources import folder as resource
from labkit.run_folder import RunFolder, process_count, read_json
from labkit.training import Settings, train

KIND = "future attention"
EMBEDDED = "field-notes"
GROWING = ("arms", "seeds")
PROFILES = {
    "small": {},
    "origin": {
        "vocab_size": 16384, "context": 200, "width": 384, "layers": 5, "heads": 6, "steps": 9000, "batch_size": 32,
        "learning_rate": 6e-4,
    },
}  # fmt: skip


@dataclass(frozen=True)
class Study:
    """What is compared, on which text, and with which budget; the same for all arms.

    Attributes:
        arms: by name (`labkit.bench.future_arms`). seeds: of weights, order of rows, dropout.
        texts: files and folders; () is the text that comes with labkit, Field Notes.
        vocab_size, context, width, layers, heads: of the model; `baseline` has wider MLPs.
        steps, batch_size, learning_rate, dtype: of the training; AdamW, warm-up, cosine decay to a tenth.
        weight: of the auxiliary loss, where an arm's name has none. loss_layers: which layers it is of, counted among
            those with columns; None: all. held_out: share of each text. eval_rows: rows of it that are measured.
        evaluations: points of the curves.
    """

    arms: tuple[str, ...] = DEFAULT
    seeds: tuple[int, ...] = (0, 1, 2)
    texts: tuple[str, ...] = ()
    vocab_size: int = 2048
    context: int = 128
    width: int = 128
    layers: int = 4
    heads: int = 4
    steps: int = 300
    batch_size: int = 16
    learning_rate: float = 1e-3
    dtype: str = "float32"
    weight: float = 1.0
    loss_layers: tuple[int, ...] | None = None
    held_out: float = 0.1
    eval_rows: int = 64
    evaluations: int = 10

    def __post_init__(self) -> None:
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise DataError(f"the seeds are {list(self.seeds)}; give at least one, and none twice")
        if self.width % self.heads:
            raise FutureAttentionError(f"{self.heads} heads do not divide the width {self.width}")
        if not 0 < self.held_out < 1 or self.eval_rows < 2 or self.evaluations < 1:
            raise DataError("hold out a share between 0 and 1, at least 2 rows of it, and measure at least once")
        if self.vocab_size < 259:
            raise DataError(f"a byte-level vocabulary needs 256 bytes and 3 special tokens; {self.vocab_size} is less")
        _ = self.settings
        for each in self.made:  # what cannot be is an error now, and not one of every run
            model = each.build(replace(self.config, vocab_size=2), 0)
            if each.loss is not None:
                ids = torch.zeros(min(2, self.batch_size), 3, dtype=torch.long)
                each.losses(model, ids[:, :-1], ids[:, 1:])

    @property
    def made(self) -> list[Arm]:
        """The arms."""
        return arms(self.arms, self.weight, self.loss_layers)

    @property
    def config(self) -> GPTConfig:
        return GPTConfig(self.vocab_size, self.context, self.width, self.layers, self.heads)

    @property
    def settings(self) -> Settings:
        """Of the training, but for its seed."""
        every = max(1, self.steps // self.evaluations)
        return Settings(
            self.steps, self.batch_size, learning_rate=self.learning_rate, dtype=self.dtype, evaluate_every=every,
            save_every=every, keep=1,
        )  # fmt: skip


@dataclass(frozen=True)
class Texts:
    """The two sides as token ids, (tokens,), and rows of the held-out one, (rows, context + 1)."""

    train: Tensor
    rows: Tensor
    seen_rows: Tensor  # as many of the training side


def run_study(
    study: Study,
    folder: str | Path,
    *,
    resume: bool = False,
    say: Callable[[str], None] = lambda text: print(text, file=sys.stderr),
) -> dict[str, str]:
    """Run what is missing of the study in `folder`; returns what failed, {run: reason}.

    Killed at any moment it goes on with `resume`; then arms and seeds may have been added, and what is done stays.

    Raises:
        DataError, TrainingError, FutureAttentionError: no text, or too little, or the folder holds another study.
    """
    if process_count() > 1:
        raise TrainingError(
            "a study trains one run after the other in one process; on several GPUs give each a folder and seeds of "
            "its own, then copy their runs into one folder and --resume with all seeds"
        )
    documents = read_documents(study.texts) if study.texts else [_embedded()]
    digests = {each.name: hashlib.sha256(each.text.encode()).hexdigest() for each in documents}
    wanted = {"kind": KIND, "study": asdict(study), "texts": digests}
    sides = [each.split(study.held_out) for each in documents]
    tokenizer = _tokenizer(Path(folder).expanduser() / "tokenizer", [side for side, _ in sides], study)
    texts = _texts(tokenizer, sides, study)
    wanted["tokens"] = {"train": len(texts.train), "rows": len(texts.rows), "vocabulary": len(tokenizer)}
    with folders.claimed(folder, resume=resume) as (path, begun):
        folders.write_json(path / "study.json", _grown(begun, wanted, path))
        if not (path / "tokenizer").is_dir():
            RunFolder(path).write_folder("tokenizer", tokenizer.save_pretrained)
        if len(texts.rows) < study.eval_rows:
            say(f"the held-out text has {len(texts.rows)} rows; {study.eval_rows} were wanted")
        todo = [
            (each, seed)
            for seed in study.seeds
            for each in study.made
            if not (path / run_folder(each.name, seed) / "metrics.json").exists()
        ]
        total, failures, spent = len(study.arms) * len(study.seeds), {}, 0.0
        say(f"{total:,} runs, {total - len(todo):,} of them done")
        for number, (each, seed) in enumerate(todo, 1):
            began = time.perf_counter()
            try:
                found = _run(study, each, seed, texts, path)
                told = f"held-out loss {found['val_loss']:.4f}"
            except LabkitError as error:
                failures[str(run_folder(each.name, seed))] = str(error)
                told = f"failed: {error}"
            spent += (seconds := time.perf_counter() - began)
            left = spent / number * (len(todo) - number) / 60
            who = f"{number} of {len(todo)}: {each.name}, seed {seed}"
            say(f"{who}: {told} ({seconds:,.0f} s; about {left:.0f} min left)")
        folders.write_failures(path, failures)
    return failures


def run_folder(name: str, seed: int) -> Path:
    """Where a run lies within the study's folder."""
    return Path("runs") / folders.slug(name) / f"seed-{seed}"


def _run(study: Study, arm: Arm, seed: int, texts: Texts, path: Path) -> dict[str, Any]:
    """One training, gone on with if it was begun."""
    where = path / run_folder(arm.name, seed)
    model = arm.build(study.config, seed)
    settings = Settings(**asdict(study.settings) | {"seed": seed})
    config = {"command": "bench future-attention", "arm": arm.name, "settings": asdict(settings)}
    config |= {"weight": study.weight, "loss_layers": study.loss_layers}
    with RunFolder.alone(where, config, resume=where.exists()) as run:
        make_row = row_maker(texts.train, Curriculum(study.steps * study.batch_size, study.context + 1), seed)
        batch = _batch([{"ids": make_row(row)} for row in range(study.batch_size)])
        flops = flops_per_token(arm, model, batch)
        carrier = _Carrier(model)
        outcome = train(
            carrier, make_row, collate=_batch, loss=lambda carrier, batch: carrier(arm, batch), settings=settings,
            run=run, evaluate=lambda carrier: _measured(carrier.gpt, texts), say=lambda text: None,
        )  # fmt: skip
        run.write_json("trainer_state.json", {"log_history": outcome.pop("history")})
        nats = token_losses(model.eval(), texts.rows)
        run.write_json("losses.json", {"rows": nats.mean(1).tolist(), "positions": nats.mean(0).tolist()})
        metrics = outcome | _measured(model, texts) | {
            "val_loss": float(nats.mean()), "parameters": sum(p.numel() for p in model.parameters()),
            "flops_per_token": flops, "tokens": study.steps * study.batch_size * study.context,
            "data_order": bytes(carrier.read.tolist()).hex(),
        }  # fmt: skip
        run.write_json("metrics.json", metrics)
        shutil.rmtree(run.checkpoints, ignore_errors=True)
        return metrics


def _batch(rows: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    """Rows of context + 1 ids: each but the last names the one after it."""
    ids = torch.stack([row["ids"] for row in rows])
    return {"input_ids": ids[:, :-1], "targets": ids[:, 1:], "attention_mask": torch.ones_like(ids[:, 1:])}


def _measured(model: GPT, texts: Texts) -> dict[str, float]:
    """Losses in nats per token, held out and on rows of the training side; and how well the future is predicted."""
    found = {
        "val_loss": float(token_losses(model, texts.rows).mean()),
        "train_loss": float(token_losses(model, texts.seen_rows).mean()),
    }
    if isinstance(model, FutureGPT) and model.future.source != "memory":
        with torch.no_grad(), model.watched() as seen:
            model(_on(texts.rows[:16, :-1], model))
            found["future_loss"] = float(FutureLoss("cosine")(seen))
    return found


@torch.no_grad()
def token_losses(model: GPT, rows: Tensor, batch_size: int = 16) -> Tensor:
    """Nats of every token but the first of each row, (rows, length - 1), each told from those before it."""
    found = []
    for part in rows.split(batch_size):
        part = _on(part, model)
        logits = model(part[:, :-1]).float()
        found.append(F.cross_entropy(logits.transpose(1, 2), part[:, 1:], reduction="none").cpu())
    return torch.cat(found)


def flops_per_token(arm: Arm, model: GPT, batch: dict[str, Tensor]) -> float:
    """Floating-point operations of a training step, forward and backward, per token: counted, not estimated.

    Attention is counted as it is written, over all pairs of a row, for every arm alike.
    """
    from torch.utils.flop_counter import FlopCounterMode

    was, model.naive = model.naive, True  # the fused kernel is not counted on a CPU
    few, cross_entropy.FEW = cross_entropy.FEW, math.inf  # nor are all products of the loss in pieces
    try:
        with torch.random.fork_rng(), FlopCounterMode(display=False) as counted:
            nats, extra = arm.losses(model, _on(batch["input_ids"], model), _on(batch["targets"], model))
            (nats if extra is None else nats + extra).backward()
    finally:
        model.naive, cross_entropy.FEW = was, few
        model.zero_grad(set_to_none=True)
    return counted.get_total_flops() / batch["input_ids"].numel()


class _Carrier(nn.Module):
    """A GPT inside: Trainer would write into its config, which it takes for one of transformers.

    `read` is the sha256 of all rows it was trained on, in their order; as a buffer it is part of every checkpoint.
    """

    def __init__(self, gpt: GPT):
        super().__init__()
        self.gpt = gpt
        self.register_buffer("read", torch.zeros(32, dtype=torch.uint8))

    def forward(self, arm: Arm, batch: dict[str, Tensor]) -> Tensor:
        rows = torch.cat([batch["input_ids"], batch["targets"][:, -1:]], dim=1).cpu().numpy().tobytes()
        digest = hashlib.sha256(bytes(self.read.tolist()) + rows).digest()
        self.read.copy_(torch.tensor(list(digest), dtype=torch.uint8))
        nats, extra = arm.losses(self.gpt, batch["input_ids"], batch["targets"])
        return nats if extra is None else nats + extra


def _on(ids: Tensor, model: GPT) -> Tensor:
    return ids.to(model.wte.weight.device)


def _embedded() -> Document:
    from labkit.datasets.files import json_lines

    passages = [line["text"] for _, line in json_lines(resource("data") / "field_notes" / "passages.jsonl")]
    return Document(EMBEDDED, "\n\n".join(passages))


def _tokenizer(saved: Path, train_sides: Sequence[str], study: Study) -> Any:
    """That of a study which goes on, or a new one."""
    from transformers import PreTrainedTokenizerFast

    if saved.is_dir():
        return PreTrainedTokenizerFast.from_pretrained(saved)
    return train_tokenizer(train_sides, study.vocab_size, study.context)


def _texts(tokenizer: Any, sides: Sequence[tuple[str, str]], study: Study) -> Texts:
    length = study.context + 1
    train_ids, held = (encode_all(tokenizer, [side[k] for side in sides]) for k in (0, 1))
    if min(len(train_ids) // 2, len(held) // 2) < length:
        raise DataError(
            f"the text has {len(train_ids):,} tokens to train on and {len(held):,} held out, and a row takes "
            f"{length:,}: add text, or take a shorter context"
        )

    def some(ids: Tensor) -> Tensor:
        count = min(study.eval_rows, len(ids) // length)  # rows do not overlap
        starts = torch.linspace(0, len(ids) - length, count).long().tolist()
        return torch.stack([ids[start : start + length] for start in starts])

    return Texts(train_ids, some(held), some(train_ids))


def read_study(path: Path) -> dict[str, Any]:
    """study.json. Raises TrainingError where there is none of this kind."""
    found = read_json(path / "study.json")
    if found is None or found.get("kind") != KIND:
        raise TrainingError(
            f"{path} holds no study of Future Attention; labkit bench future-attention --output-dir {path} makes one"
        )
    return found


def _grown(begun: dict[str, Any] | None, wanted: dict[str, Any], path: Path) -> dict[str, Any]:
    """The study with what was added to it. TrainingError where something else has changed."""
    wanted = folders.plain(wanted)
    if begun is None:
        return wanted
    if begun.get("kind") != KIND:
        raise TrainingError(f"{path} holds a study of another kind; give --output-dir a new folder")
    was, now = begun["study"], wanted["study"]
    changed = [name for name in now if name not in GROWING and was.get(name) != now[name]]
    if begun["texts"] != wanted["texts"]:
        raise TrainingError(f"the study in {path} was begun on other texts")
    if changed:
        told = "; ".join(f"{name} was {was.get(name)!r}, now {now[name]!r}" for name in changed)
        raise TrainingError(f"the study in {path} was begun otherwise: {told}")
    more = {name: [*was[name], *(each for each in now[name] if each not in was[name])] for name in GROWING}
    return begun | {"study": was | more}
