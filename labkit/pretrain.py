"""Train a small GPT-2 from nothing on any text: tokenizer, rows, model, and its bits per byte.

`pretrain(["my-texts/"], "run")`, or `labkit pretrain my-texts --output-dir run`. This is how gpt2-mini was made.
"""

from __future__ import annotations

import hashlib
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, ByteLevelBPETokenizer
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from labkit.datasets.text import read_documents
from labkit.decoder.running import evaluating, random_state_kept
from labkit.errors import DataError, TrainingError
from labkit.models.cards import save
from labkit.objectives import Collator, generator, loss
from labkit.run_folder import Log, RunFolder, process_count, to_stderr
from labkit.training import per_step, preset, settled, steps, train

END, PAD, MASK = "<|endoftext|>", "<pad>", "<mask>"  # ids 0, 1, 2; <mask> is for a later training


@dataclass(frozen=True)
class Shape:
    """The size of the GPT-2 to be trained. Its heads are 64 wide, as in every GPT-2."""

    vocab_size: int = 4096  # 256 bytes, 3 special tokens, and what the BPE learns
    context: int = 512
    width: int = 256
    layers: int = 6
    dropout: float = 0.1

    def __post_init__(self) -> None:
        if self.width < 64 or self.width % 64:
            raise TrainingError(f"width is {self.width}; it must be a multiple of 64, the width of a GPT-2 head")


def pretrain(
    texts: Sequence[str | Path],
    output_dir: str | Path,
    *,
    shape: Shape | None = None,
    settings: dict[str, Any] | None = None,
    held_out: float = 0.1,
    repeats: float = 0.0,
    first_length: int | None = None,
    resume: bool = False,
    log: Log = to_stderr,
) -> dict[str, Any]:
    """Train a tokenizer and a GPT-2 on `texts` (files and folders); returns the metrics and leaves a run folder.

    `settings`: of `labkit.training.preset`. `held_out`: the last fraction of each text, which is never trained on; bits
    per byte are measured there. `repeats`, `first_length`: as in `TextRows`.
    """
    shape = shape or Shape()
    settings = settled(settings or preset("lm", learning_rate=1e-3), "gpt2", log)
    if first_length is not None and not 2 <= first_length <= shape.context:
        raise TrainingError(f"first_length is {first_length}; it must be 2 to the context, {shape.context} tokens")
    documents = read_documents(texts)
    config = {
        "command": "pretrain", "texts": {d.name: hashlib.sha256(d.text.encode()).hexdigest() for d in documents},
        "shape": asdict(shape), "settings": settings, "held_out": held_out, "repeats": repeats,
        "first_length": first_length, "processes": process_count(),
    }  # fmt: skip
    if (done := RunFolder.check(output_dir, config, resume=resume).metrics) is not None:
        return done
    train_texts, held_texts = zip(*(document.split(held_out) for document in documents), strict=True)
    held = {document.name: text for document, text in zip(documents, held_texts, strict=True) if text.strip()}
    tokenizer = train_tokenizer(train_texts, shape.vocab_size, shape.context)
    ids = encode_all(tokenizer, train_texts)
    if len(ids) <= shape.context:
        raise DataError(f"the text has {len(ids):,} tokens to train on, and one row takes {shape.context:,}: add text")
    model = new_model(shape, settings["seed"])
    n_eval = sum(len(text.encode()) for text in held.values())
    n_steps = steps((len(ids) - 1) // shape.context, settings)
    log(f"{len(documents)} text(s): {len(ids):,} tokens to train on, {n_eval:,} bytes held out")
    log(f"GPT-2 of {model.num_parameters() / 1e6:.1f} M parameters, {n_steps:,} steps")
    rows = TextRows(ids, n_steps * per_step(settings), shape.context, settings["seed"], first_length, repeats)
    collator = Collator("next", pad_id=tokenizer.pad_token_id)

    def scores(model: nn.Module) -> dict[str, float]:
        return {name: bits_per_byte(model, tokenizer, text) for name, text in held.items()}

    with RunFolder.alone(output_dir, config, resume=resume) as run:
        outcome = train(
            model,
            rows,
            collate=lambda batch: collator(rows.pieces(batch)),
            loss=lambda model, batch: loss(model, batch, "next"),
            settings=settings,
            run=run,
            tokens=lambda k: shape.context,
            evaluate=lambda model: {"bits_per_byte": statistics.fmean(scores(model).values())} if held else {},
            log=log,
        )
        run.write("model", lambda folder: save(folder, model, tokenizer))
        with evaluating(model):
            metrics = outcome | {"bits_per_byte": scores(model)}
        metrics |= {"n_train": len(ids), "n_eval": n_eval, "parameters": model.num_parameters()}
        run.write_json("metrics.json", metrics)
        return metrics


@dataclass(frozen=True)
class TextRows:
    """The rows of a run on one text: row k depends on the seed and on k alone.

    Each pass reads every token once, cuts the text into rows at another offset, and takes them in another order. The
    rows change as the run goes on, so that heads which attend to earlier tokens form quickly.

    Attributes:
        ids: of the text, (tokens,). count: of rows. context: tokens per row.
        first_length: for the first half of the run each row is cut into pieces of this many tokens, which do not attend
            to each other. The pieces then double in equal stages, and are whole rows in the last fifth.
        repeats: fraction of the pieces that repeat one passage of 4 to 64 tokens (at most 3/8 of the piece), half of
            them one of random tokens, which can only be predicted from their earlier occurrence. The fraction falls to
            a tenth by the middle of the run.
    """

    ids: Tensor
    count: int
    context: int
    seed: int
    first_length: int | None = None
    repeats: float = 0.0

    def __len__(self) -> int:
        return self.count

    def length(self, row: int) -> int:
        """Tokens per piece of row number `row`."""
        first, progress = self.first_length or self.context, row / self.count
        doublings = math.ceil(math.log2(self.context / first))
        if progress >= 0.8 or not doublings:
            return self.context
        stage = 0 if progress < 0.5 or doublings == 1 else 1 + int((progress - 0.5) / 0.3 * (doublings - 1))
        return first * 2**stage

    def __getitem__(self, row: int) -> dict[str, Any]:
        """Row number `row`: "ids" (context,), and its number, "row"."""
        per_pass = (len(self.ids) - 1) // self.context
        rng = generator(self.seed, -1 - row // per_pass)
        offset = int(torch.randint(len(self.ids) - per_pass * self.context, (), generator=rng))
        start = offset + int(torch.randperm(per_pass, generator=rng)[row % per_pass]) * self.context
        pieces = self.ids[start : start + self.context].split(self.length(row))
        rng = generator(self.seed + 1, row)
        repeating = torch.rand(len(pieces), generator=rng) < self.repeats * max(0.1, 1 - 2 * row / self.count)
        pieces = [self._repeated(piece, rng) if r else piece for piece, r in zip(pieces, repeating, strict=True)]
        return {"row": row, "ids": torch.cat(pieces)}

    def pieces(self, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """The pieces of the rows of a batch, all of the length that the first of these rows has."""
        length = self.length(min(row["row"] for row in rows))
        return [row | {"ids": piece} for row in rows for piece in row["ids"].split(length)]

    @cached_property
    def _vocabulary(self) -> Tensor:
        return self.ids.unique()

    def _repeated(self, piece: Tensor, rng: torch.Generator) -> Tensor:
        longest = max(1, min(64, 3 * len(piece) // 8))
        length = int(torch.randint(min(4, longest), longest + 1, (), generator=rng))
        passage = self._vocabulary[torch.randint(len(self._vocabulary), (length,), generator=rng)]
        if float(torch.rand((), generator=rng)) >= 0.5:
            passage = piece[:length]
        return passage.repeat(len(piece) // length + 1)[: len(piece)]


def train_tokenizer(texts: Sequence[str], vocab_size: int, context: int) -> Any:
    """A byte-level BPE of at most `vocab_size` tokens, with tokens of its own for end, padding and mask."""
    mask = AddedToken(MASK, lstrip=True, special=True)  # the space before it belongs to it, as to a word
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(texts, vocab_size, min_frequency=0, show_progress=False, special_tokens=[END, PAD, mask])
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe._tokenizer, bos_token=END, eos_token=END, pad_token=PAD, mask_token=mask,
        padding_side="right", model_max_length=context, clean_up_tokenization_spaces=False,
    )  # fmt: skip


def encode_all(tokenizer: Any, texts: Sequence[str]) -> Tensor:
    """All texts as one line of token ids, each ended by the end-of-text token. Shape (tokens,), int64."""
    rows = [[*tokenizer(text, verbose=False)["input_ids"], tokenizer.eos_token_id] for text in texts]
    return torch.cat([torch.tensor(row) for row in rows])


def new_model(shape: Shape, seed: int) -> Any:
    """A GPT-2 with fresh weights, set so that heads form within minutes rather than hours. All of it is trained.

    - GPT-2's own deviation of 0.02 suits a width of 768 and more; here matrices start at 1 / sqrt(width), divided by
      sqrt(2 layers) where they add to the residual stream.
    - Position embeddings start as sinusoids (Vaswani et al. 2017) of twice the size of token embeddings.
    - Keys start similar to queries, and what a head writes similar to what it read, as they are in trained models
      (Trockman and Kolter 2023, "Mimetic Initialization of Self-Attention Layers", but with a positive value product).

    Attention probabilities are not dropped: SDPA's fast path on a CPU has no dropout.
    """
    config = GPT2Config(
        vocab_size=shape.vocab_size, n_positions=shape.context, n_embd=shape.width, n_layer=shape.layers,
        n_head=shape.width // 64, resid_pdrop=shape.dropout, embd_pdrop=shape.dropout, attn_pdrop=0.0,
        bos_token_id=0, eos_token_id=0, pad_token_id=1,
    )  # fmt: skip
    with random_state_kept(seed):
        model = GPT2LMHeadModel(config)
        wide = 1 / math.sqrt(shape.width) / config.initializer_range
        # wavelengths from 2 pi to 2 pi times the context
        angle = torch.arange(shape.context)[:, None] * shape.context ** -torch.linspace(0, 1, shape.width // 2)
        sinusoids = torch.cat([angle.sin(), angle.cos()], dim=1)  # (context, width)
        with torch.no_grad():
            model.transformer.wpe.weight.copy_(2 * config.initializer_range * math.sqrt(2) * sinusoids)
            for block in model.transformer.h:
                for weight in (p for p in block.parameters() if p.ndim == 2):
                    weight.mul_(wide)
                query, key, value = block.attn.c_attn.weight.split(shape.width, dim=1)  # 3 x (width, width), views
                key.mul_(math.sqrt(1 - 0.7**2)).add_(query, alpha=0.7)
                nn.init.orthogonal_(value)
                block.attn.c_proj.weight.add_(value.T, alpha=0.5)
    return model


@torch.no_grad()
def bits_per_byte(model: nn.Module, tokenizer: Any, text: str) -> float:
    """The bits that the model needs per byte of `text`; every token but the first counts once.

    Windows of the model's context advance by half of it, so that a token has at least half a context before it.
    """
    ids = encode_all(tokenizer, [text])[:-1].to(model.device)
    context, nats = model.config.n_positions, 0.0
    overlap = context - context // 2  # what an earlier window has counted
    for start in range(0, max(1, len(ids) - overlap), context // 2):
        window = ids[start : start + context]
        logits = model(window[None], use_cache=False).logits[0, :-1].float()  # (seq - 1, vocab)
        costs = F.cross_entropy(logits, window[1:], reduction="none")
        nats += float(costs[overlap - 1 if start else 0 :].sum())
    return nats / math.log(2) / len(text.encode())
