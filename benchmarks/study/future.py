"""Compare Future Attention with its controls: the same small GPT trained by arms, over seeds.

    python benchmarks/study/future.py --arms baseline,future:cosine:50,memory --output-dir runs/future
    python benchmarks/study/future.py --arms baseline,future:cosine:25,future:cosine:50,future:cosine:100 \\
        --text moby_dick.txt --output-dir runs/sweep

All arms of a seed read the same rows in the same order and start with the same weights wherever they have the same
matrices. The last share of each text is held out. The score is the held-out loss in nats per token, so a negative
difference is an improvement. The same command again continues a study, within a run too, and may add arms and seeds.
Arms: see labkit/future_attention/arms.py.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).parents[2]))  # the checkout, installed or not

from benchmarks.study import report, runner  # noqa: E402
from benchmarks.study.runner import listed, option, slug  # noqa: E402
from labkit.datasets import embedded  # noqa: E402
from labkit.datasets.text import Document, read_documents  # noqa: E402
from labkit.errors import DataError, TrainingError  # noqa: E402
from labkit.future_attention import FutureGPT, FutureLoss  # noqa: E402
from labkit.future_attention.arms import Arm, arm, token_losses  # noqa: E402
from labkit.gpt import GPT, GPTConfig  # noqa: E402
from labkit.pretrain import TextRows, encode_all, train_tokenizer  # noqa: E402
from labkit.run_folder import RunFolder, read_json  # noqa: E402
from labkit.training import preset, settled, train  # noqa: E402

REFERENCE = "baseline"
DEFAULT = (
    "baseline", "future:cosine:50", "future:none:50", "memory", "smaller", "shuffled:cosine:50", "tokens:cosine:50",
    "memory:50", "dropout:0.1", "dropout:0.2", "multi-token:1",
)  # fmt: skip
NEIGHBOURS = 4  # held-out rows that are neighbours in the text and make one group
PROFILES = {
    "small": {},  # minutes on a CPU
    "origin": {  # 15 million parameters, for a GPU and millions of tokens of text
        "vocab_size": 16384, "context": 200, "width": 384, "layers": 5, "heads": 6, "steps": 9000, "batch_size": 32,
        "learning_rate": 6e-4,
    },
}  # fmt: skip


@dataclass(frozen=True)
class Study:
    """What is compared, on which text, and with which budget; the same for all arms.

    held_out: share of each text. eval_rows: rows of it that are scored. evaluations: points of the curves.
    """

    arms: tuple[str, ...] = option(DEFAULT, "what is compared", listed())
    seeds: tuple[int, ...] = option((0, 1, 2), "of weights, order of the rows and dropout", listed(int))
    texts: tuple[str, ...] = option(
        (), "text file or folder, may be repeated; default: Field Notes", action="append", name="--text"
    )
    vocab_size: int = option(2048, "of the tokenizer")
    context: int = option(128, "tokens per row")
    width: int = option(128, "of the model")
    layers: int = option(4, "of the model")
    heads: int = option(4, "of each layer")
    steps: int = option(300, "of training")
    batch_size: int = option(16, "rows per step")
    learning_rate: float = option(1e-3, "peak learning rate, the same for all arms")
    dtype: str = option("float32", "float32, bfloat16 or float16")
    weight: float = option(1.0, "of an auxiliary loss whose name sets none (mse@1000 does)")
    loss_layers: tuple[int, ...] | None = option(None, "layers with the auxiliary loss; default: all", listed(int))
    held_out: float = 0.1
    eval_rows: int = 64
    evaluations: int = 10

    def __post_init__(self) -> None:
        if REFERENCE not in self.arms:
            raise DataError(f"the arms are {', '.join(self.arms)}; {REFERENCE} must be among them")
        if self.width % self.heads or self.vocab_size < 259:
            raise DataError("the heads must divide the width, and a byte-level vocabulary needs 259 entries")
        for name in self.arms:  # an arm that cannot be built is an error now, not one of every run
            self.arm(name).build(replace(self.config, vocab_size=2), 0)

    @property
    def config(self) -> GPTConfig:
        return GPTConfig(self.vocab_size, self.context, self.width, self.layers, self.heads)

    def arm(self, name: str) -> Arm:
        return arm(name, self.weight, self.loss_layers)


@dataclass(frozen=True)
class Texts:
    """Token ids to train on, (tokens,), held-out rows, (rows, context + 1), and as many rows of the training side."""

    train: Tensor
    rows: Tensor
    train_rows: Tensor


@dataclass(frozen=True)
class Run:
    arm: str
    seed: int

    @property
    def folder(self) -> Path:
        return Path("runs", slug(self.arm), f"seed-{self.seed}")

    def __str__(self) -> str:
        return f"{self.arm}, seed {self.seed}"


def run_study(study: Study, folder: str | Path, **options: Any) -> dict[str, str]:
    """Run what is missing of the study in `folder`. Returns {run: reason} of the runs that failed."""
    field_notes = Document("field-notes", "\n\n".join(passage.text for passage in embedded.passages()))
    documents = read_documents(study.texts) if study.texts else [field_notes]
    digests = {document.name: hashlib.sha256(document.text.encode()).hexdigest() for document in documents}
    sides = [document.split(study.held_out) for document in documents]
    saved = Path(folder).expanduser() / "tokenizer"
    if saved.exists():
        tokenizer = PreTrainedTokenizerFast.from_pretrained(saved)
    else:
        tokenizer = train_tokenizer([side for side, _ in sides], study.vocab_size, study.context)
    texts = _texts(tokenizer, sides, study)
    path = runner.begun(folder, asdict(study) | {"texts": digests}, ("arms", "seeds"))
    if not saved.exists():
        RunFolder(path).write("tokenizer", tokenizer.save_pretrained)
    todo = [Run(name, seed) for seed in study.seeds for name in study.arms]
    return runner.run_all(todo, partial(_train, study, texts, path), path, score=_score, **options)


def tables(folder: str | Path, reference: str = REFERENCE) -> pd.DataFrame:
    """The finished runs of the study in `folder`, one row for each arm."""
    path, study = Path(folder).expanduser(), runner.read_study(folder)
    runs: dict[str, dict[int, dict[str, Any]]] = {}
    for name in sorted(study["arms"], key=lambda name: name != reference):
        for seed in study["seeds"]:
            where = path / Run(name, seed).folder
            if (metrics := read_json(where / "metrics.json")) is not None:
                losses = read_json(where / "losses.json")["rows"]
                runs.setdefault(name, {})[seed] = metrics | {"rows": losses}
    if not runs:
        raise TrainingError(f"{folder}: no run is finished yet")
    for seed in study["seeds"]:
        if len({of[seed]["data_order"] for of in runs.values() if seed in of}) > 1:
            raise TrainingError(f"{folder}: the arms of seed {seed} did not read the same rows in the same order")
    scores = {name: _scores(of) for name, of in runs.items()}
    rows = report.table(scores, reference, scale=1.0, condition=path.absolute().name)
    for key in ("parameters", "flops_per_token"):
        rows[key] = [int(next(iter(runs[name].values()))[key]) for name in rows["arm"]]
    for key in ("train_loss", "future_loss", "seconds"):
        rows[key] = [np.mean([of[key] for of in runs[name].values() if key in of] or np.nan) for name in rows["arm"]]
    return rows


def _scores(runs: dict[int, dict[str, Any]]) -> report.Scores:
    above = np.array([runs[seed]["rows"] for seed in sorted(runs)])
    numbers = np.arange(above.shape[1])
    return report.Scores(
        above, np.ones_like(above), numbers // NEIGHBOURS, tuple(map(str, numbers)), tuple(sorted(runs))
    )


def _train(study: Study, texts: Texts, path: Path, run: Run) -> dict[str, Any]:
    """One training run, continued from its last checkpoint if there is one."""
    one, every = study.arm(run.arm), max(1, study.steps // study.evaluations)
    settings = preset(
        "lm", max_steps=study.steps, per_device_train_batch_size=study.batch_size, learning_rate=study.learning_rate,
        dtype=study.dtype, seed=run.seed, eval_steps=every, save_steps=every, save_total_limit=1,
    )  # fmt: skip
    settings = settled(settings, "gpt2", lambda text: None)
    model, where = one.build(study.config, run.seed), path / run.folder
    config = {"arm": run.arm, "settings": settings, "weight": study.weight, "loss_layers": study.loss_layers}
    with RunFolder.alone(where, config, resume=where.exists()) as folder:
        rows = TextRows(texts.train, study.steps * study.batch_size, study.context + 1, run.seed)
        flops = flops_per_token(one, model, _batch([rows[row] for row in range(study.batch_size)]))
        carrier = _Carrier(model)
        outcome = train(
            carrier, rows, collate=_batch,
            loss=lambda carrier, batch: carrier(one, batch), settings=settings, run=folder,
            tokens=lambda k: study.context, evaluate=lambda carrier: _evaluated(carrier.gpt, texts),
            log=lambda text: None,
        )  # fmt: skip
        losses = token_losses(model.eval(), texts.rows)  # (rows, context)
        folder.write_json("losses.json", {"rows": losses.mean(1).tolist(), "positions": losses.mean(0).tolist()})
        metrics = outcome | _evaluated(model, texts) | {
            "parameters": sum(p.numel() for p in model.parameters()), "flops_per_token": flops,
            "data_order": bytes(carrier.read.tolist()).hex(),
        }  # fmt: skip
        folder.write_json("metrics.json", metrics)
        shutil.rmtree(folder.checkpoints, ignore_errors=True)
        return metrics


class _Carrier(nn.Module):
    """Contains the GPT, because Trainer would write into its config.

    `read` is the sha256 of all rows of the training, in their order; as a buffer it is part of every checkpoint.
    """

    def __init__(self, gpt: GPT):
        super().__init__()
        self.gpt = gpt
        self.register_buffer("read", torch.zeros(32, dtype=torch.uint8))

    def forward(self, arm: Arm, batch: dict[str, Tensor]) -> Tensor:
        rows = torch.cat([batch["input_ids"], batch["labels"][:, -1:]], dim=1).cpu().numpy().tobytes()
        digest = hashlib.sha256(bytes(self.read.tolist()) + rows).digest()
        self.read.copy_(torch.tensor(list(digest), dtype=torch.uint8))
        loss, extra = arm.losses(self.gpt, batch["input_ids"], batch["labels"])
        return loss if extra is None else loss + extra


def flops_per_token(arm: Arm, model: GPT, batch: dict[str, Tensor]) -> float:
    """Floating-point operations of a training step per token, counted. Attention counts all pairs of a row."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    by_products = sdpa_kernel(SDPBackend.MATH)  # the fused attention kernel of a CPU is not counted
    with torch.random.fork_rng(), by_products, FlopCounterMode(display=False) as counted:
        device = model.wte.weight.device
        loss, extra = arm.losses(model, batch["input_ids"].to(device), batch["labels"].to(device))
        (loss if extra is None else loss + extra).backward()
    model.zero_grad(set_to_none=True)
    return counted.get_total_flops() / batch["input_ids"].numel()


def _evaluated(model: GPT, texts: Texts) -> dict[str, float]:
    """Nats per token, held out and on the training side; and the cosine loss of the predicted future."""
    losses = {
        "val_loss": float(token_losses(model, texts.rows).mean()),
        "train_loss": float(token_losses(model, texts.train_rows).mean()),
    }
    if isinstance(model, FutureGPT) and model.future.source != "memory":
        with torch.no_grad(), model.watched() as seen:
            model(texts.rows[:16, :-1].to(model.wte.weight.device))
            losses["future_loss"] = float(FutureLoss("cosine")(seen))
    return losses


def _batch(rows: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    """Rows of context + 1 ids: each id but the first is the target of the one before it."""
    ids = torch.stack([row["ids"] for row in rows])
    return {"input_ids": ids[:, :-1], "labels": ids[:, 1:], "attention_mask": torch.ones_like(ids[:, 1:])}


def _texts(tokenizer: Any, sides: Sequence[tuple[str, str]], study: Study) -> Texts:
    length = study.context + 1
    train_ids, held = (encode_all(tokenizer, [side[k] for side in sides]) for k in (0, 1))
    if min(len(train_ids), len(held)) < 2 * length:
        raise DataError(
            f"the text has {len(train_ids):,} tokens to train on and {len(held):,} held out, and a row has {length:,}: "
            "add text, or choose a shorter context"
        )

    def rows_of(ids: Tensor) -> Tensor:
        count = min(study.eval_rows, len(ids) // length)  # the rows do not overlap
        starts = torch.linspace(0, len(ids) - length, count).long().tolist()
        return torch.stack([ids[start : start + length] for start in starts])

    return Texts(train_ids, rows_of(held), rows_of(train_ids))


def _score(run: Run, metrics: dict[str, Any]) -> str:
    return f"held-out loss {metrics['val_loss']:.4f}"


def _run(options: argparse.Namespace) -> dict[str, str]:
    study = Study(**PROFILES[options.profile] | runner.given(options, Study))
    return run_study(study, options.output_dir, until=options.until)


def main() -> None:
    parser = runner.parser(__doc__, REFERENCE, Study)
    profile = "small (minutes on a CPU) or origin (for a GPU), which sets other defaults"
    parser.add_argument("--profile", choices=tuple(PROFILES), default="small", help=profile)
    unit = {"unit": "nats per token", "digits": 4}
    runner.main(parser, _run, lambda options: tables(options.output_dir, options.reference), **unit)


if __name__ == "__main__":
    main()
