"""Adapt a language model with a new objective: MLM or MNTP after unmasking, prefix-LM, hybrid, or the next token.

    lm = labkit.load("gpt2-mini")
    metrics = train_lm("gpt2-mini", texts, "run", objective="mlm", settings=preset("lm", max_steps=500))
    fill_in(lm, "The ferry <mask> at noon.", reads="same")

How well a model fills a gap is scored on the same hidden tokens before and after, so the comparison is paired.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from labkit.convert import choose_layers, to_bidirectional
from labkit.decoder.limits import require_positions
from labkit.decoder.running import evaluating
from labkit.errors import DataError, require_one_of
from labkit.models import adapters, cards, load
from labkit.models.adapters import weights_to, with_lora
from labkit.models.special_tokens import ensure_mask_token
from labkit.objectives import Collator, by_name, corruption_for, generator, logits_at, loss
from labkit.run_folder import Log, RunFolder, process_count, to_stderr
from labkit.tasks.base import IGNORED, pad_id, padded
from labkit.tasks.finetune import digest
from labkit.tasks.in_force import require_window
from labkit.training import draw, settled, train


@dataclass(frozen=True)
class FillInScores:
    """How well a model predicts hidden tokens, each hidden alone: the cost of each, and the rank of the right token.

    The pseudo-perplexity is the exponential of the mean cost (Salazar et al. 2020).
    """

    nats: list[float]
    ranks: list[int]

    @property
    def pseudo_perplexity(self) -> float:
        return math.exp(sum(self.nats) / len(self.nats))

    @property
    def accuracy(self) -> float:
        return self.ranks.count(1) / len(self.ranks)

    @property
    def top_5(self) -> float:
        return sum(rank <= 5 for rank in self.ranks) / len(self.ranks)

    def accuracy_interval(self) -> tuple[float, float]:
        """95 % Wilson interval of the accuracy."""
        from scipy.stats import binomtest

        return tuple(binomtest(self.ranks.count(1), len(self.ranks)).proportion_ci(method="wilson"))


def train_lm(
    model: Any,
    texts: Sequence[str],
    output_dir: str | Path,
    *,
    objective: str,
    settings: dict[str, Any],
    eval_texts: Sequence[str] = (),
    max_length: int = 128,
    mask_rate: float = 0.15,
    whole_words: bool = False,
    window: str = "keep",
    layers: str = "all",
    lora: bool = False,
    rank: int = 16,
    dropout: float | None = None,
    attn: str | None = None,
    resume: bool = False,
    log: Log = to_stderr,
) -> dict[str, Any]:
    """Train the model called `model` (a name, hub id or folder) on `texts`; leaves a run folder, returns its metrics.

    "mlm" and "mntp" make the model bidirectional first, and the saved model is (`window`, `layers`: as in `finetune`);
    "prefix" and "hybrid" put their mask in force row by row. Each text is cut into rows of at most `max_length` tokens.
    With `lora` the matrices get adapters of `rank`, saved in `adapter/` and merged into the model in `model/`.

    Metrics: those of `labkit.training.train`, `loss` before and after on `eval_texts`, and, where tokens are hidden,
    `pseudo_perplexity`, `fill_in_accuracy` and `fill_in_top_5` as the model was, unmasked, and after.
    """
    goal = by_name(objective)
    # small updates are lost in 16-bit weights, so weights that are trained are float32; LoRA's are by themselves
    stored = None if settings["dtype"] == "auto" else settings["dtype"]
    lm = load(model, attn=attn, dtype=stored if lora else "float32")
    settings = settled(settings, lm.model.config.get_text_config().model_type, log)
    config = {
        "command": "train lm", "model": str(model), "objective": objective, "settings": settings,
        "texts": digest(texts), "eval_texts": digest(eval_texts), "max_length": max_length, "mask_rate": mask_rate,
        "whole_words": whole_words, "window": window, "layers": layers, "lora": lora, "rank": rank,
        "dropout": dropout, "attn": attn, "processes": process_count(),
    }  # fmt: skip
    if (done := RunFolder.check(output_dir, config, resume=resume).metrics) is not None:
        return done
    require_window(lm.model, window)
    if lora:
        weights_to(lm.model, getattr(torch, settings["dtype"]))
    if goal.hides_tokens:
        ensure_mask_token(lm.model, lm.tokenizer)
    corruption = corruption_for(lm.tokenizer, mask_rate, whole_words) if goal.hides_tokens else None
    if dropout is not None:
        set_dropout(lm.model, dropout)
    chosen = choose_layers(layers, lm.model.config.get_text_config().num_hidden_layers)
    rows = cut_into_rows(lm.tokenizer, texts, max_length)
    held = cut_into_rows(lm.tokenizer, eval_texts, max_length) if eval_texts else []
    require_positions(max(map(len, rows + held)), lm.model.config, refusal=DataError)
    collate = Collator(objective, pad_id=pad_id(lm.tokenizer), corruption=corruption, seed=settings["seed"])
    order = [row for (row,) in draw([len(row) for row in rows], settings, packed=True)]
    scores: dict[str, dict[str, float]] = {}

    def measure(model: nn.Module, state: str) -> dict[str, float]:
        """Log and return the scores of a state of the model: before training, unmasked, or after."""
        if not held:
            return {}
        # until it is trained, an unmasked decoder predicts a hidden token at the position before it
        reads = reads_of(objective) if state == "after" else "before"
        scores[state] = _scores(model, lm.tokenizer, held, collate, reads)
        if state != "after":
            log(f"{state}: {', '.join(f'{name} {value:.3f}' for name, value in scores[state].items())}")
        names = {"loss": "eval_loss"}  # "loss" is the training's own
        return {names.get(name, name): value for name, value in scores[state].items() if name != "n"}

    measure(lm.model, "before")
    if goal.attention == "bidirectional":
        to_bidirectional(lm.model, window=window, layers=chosen)
        measure(lm.model, "unmasked")
    trained = with_lora(lm.model, settings["seed"], rank=rank) if lora else lm.model
    with RunFolder.alone(output_dir, config, resume=resume) as run:  # nothing is written before all input is checked
        outcome = train(
            trained,
            [{"row": number, "ids": rows[row]} for number, row in enumerate(order)],
            collate=collate,
            loss=lambda model, batch: loss(model, batch, objective),
            settings=settings,
            run=run,
            tokens=lambda k: len(rows[order[k]]),
            evaluate=(lambda model: measure(model, "after")) if held else None,
            log=log,
        )
        if lora:
            facts = {"base": str(model), "mask_token": goal.hides_tokens}
            run.write("adapter", lambda folder: adapters.save(trained, folder, **facts))
        best = trained.merge_and_unload() if lora else trained
        run.write("model", lambda folder: cards.save(folder, best, lm.tokenizer))
        metrics = outcome | {"scores": scores, "n_train": len(rows), "n_eval": len(held)}
        run.write_json("metrics.json", metrics)
        return metrics


@torch.no_grad()
def fill_in(lm: Any, text: str, *, reads: str, top: int = 5) -> list[list[tuple[str, float]]]:
    """For every mask token in `text`: the `top` likeliest tokens with their probabilities.

    `lm` has `.model` and `.tokenizer` (with a mask token, see `ensure_mask_token`). `reads`: where the logits of a
    hidden token are: "same" for a model trained with MLM, "before" for MNTP and for a model of the next token.
    """
    ids = lm.tokenizer(text)["input_ids"]
    hidden = [place for place, id in enumerate(ids) if id == lm.tokenizer.mask_token_id]
    if not hidden:
        raise DataError(f"there is no mask token {lm.tokenizer.mask_token or ''} in {text!r}: nothing to fill in")
    best = _probabilities(lm.model, padded([ids] * len(hidden), 0), hidden, reads).topk(top)
    return [
        [(lm.tokenizer.decode([id]), p) for id, p in zip(*of_one, strict=True)]
        for of_one in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]


@torch.no_grad()
def fill_in_scores(
    model: nn.Module,
    tokenizer: Any,
    rows: Sequence[Tensor],
    *,
    reads: str,
    positions: int = 200,
    seed: int = 0,
    batch_size: int = 16,
) -> FillInScores:
    """Hide `positions` tokens of the rows, one at a time, and score what the model predicts there.

    Which tokens are hidden depends on the rows (of `cut_into_rows`) and on `seed` alone, so two models predict the same
    tokens. `reads`: as in `fill_in`.
    """
    special = torch.tensor(tokenizer.all_special_ids)
    places = [(r, i) for r, row in enumerate(rows) for i in range(1, len(row)) if row[i] not in special]
    if not places:
        raise DataError("there is no token to hide: the texts are empty or of one token each")
    order = torch.randperm(len(places), generator=generator(seed, 0))[:positions].tolist()
    chosen = sorted((places[k] for k in order), key=lambda place: len(rows[place[0]]))
    nats: list[float] = []
    ranks: list[int] = []
    for first in range(0, len(chosen), batch_size):
        numbers, hidden = zip(*chosen[first : first + batch_size], strict=True)
        batch = padded([rows[r].tolist() for r in numbers], pad_id(tokenizer))
        at = torch.arange(len(hidden)), torch.tensor(hidden)
        truth = batch["input_ids"][at]  # (batch,)
        batch["input_ids"][at] = tokenizer.mask_token_id
        probabilities = _probabilities(model, batch, hidden, reads).cpu()
        right = probabilities.gather(1, truth[:, None])
        nats += (-right[:, 0].log()).tolist()
        ranks += ((probabilities > right).sum(-1) + 1).tolist()
    return FillInScores(nats, ranks)


def cut_into_rows(tokenizer: Any, texts: Sequence[str], max_length: int) -> list[Tensor]:
    """Each text as token ids, cut into rows of at most `max_length`; what is left of a text makes a row of its own."""
    ids = [torch.tensor(tokenizer(text, verbose=False)["input_ids"], dtype=torch.long) for text in texts]
    rows = [row for of_text in ids for row in of_text.split(max_length) if len(row) >= 2]
    if not rows:
        raise DataError("the texts are empty: there is nothing to train on")
    return rows


def set_dropout(model: nn.Module, p: float) -> None:
    """Set every dropout of the model to `p` in [0, 1), those that are numbers on attention modules included."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = p
        elif isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = p


def reads_of(objective: str) -> str:
    """Where a model of this objective predicts a hidden token: "same" for MLM, "before" for all others."""
    return "same" if objective == "mlm" else "before"


def _scores(model: Any, tokenizer: Any, rows: list[Tensor], collate: Collator, reads: str) -> dict[str, float]:
    """The loss over `n` tokens; for the objectives of bidirectional models also the scores of `n` hidden tokens."""
    items = [{"row": -1 - number, "ids": row} for number, row in enumerate(rows)]
    total = n = 0
    with evaluating(model):
        for first in range(0, len(items), 8):
            batch = {name: value.to(model.device) for name, value in collate(items[first : first + 8]).items()}
            counted = int((batch["labels"] != IGNORED).sum())
            total += counted * float(loss(model, batch, collate.objective))
            n += counted
    if by_name(collate.objective).attention != "bidirectional":
        return {"loss": total / n, "n": n}
    filled = fill_in_scores(model, tokenizer, rows, reads=reads)
    return {
        "loss": total / n, "n": len(filled.ranks), "pseudo_perplexity": filled.pseudo_perplexity,
        "fill_in_accuracy": filled.accuracy, "fill_in_top_5": filled.top_5,
    }  # fmt: skip


def _probabilities(model: Any, batch: dict[str, Tensor], hidden: Sequence[int], reads: str) -> Tensor:
    """(rows, vocab): the probabilities that the model gives for the position hidden[b] of row b."""
    require_one_of("reads", reads, ("same", "before"))
    where = torch.tensor(hidden) - int(reads == "before")
    if bool((where < 0).any()):
        raise DataError("the first token is hidden, and there is no position before it to read it from")
    positions = torch.zeros_like(batch["input_ids"], dtype=torch.bool)
    positions[torch.arange(len(where)), where] = True
    inputs = [tensor.to(model.device) for tensor in (batch["input_ids"], batch["attention_mask"], positions)]
    with evaluating(model):
        return logits_at(model, *inputs).float().softmax(-1)
