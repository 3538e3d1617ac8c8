"""Train a small GPT-2 from nothing on any text: tokenizer, rows, model, and its bits per byte.

`pretrain(["my-texts/"], "run")`, or `labkit pretrain my-texts --output-dir run`. This is how gpt2-mini was made.
"""

from __future__ import annotations

import hashlib
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, ByteLevelBPETokenizer
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from labkit.datasets.text import read_documents
from labkit.decoder.running import evaluating, random_state_kept
from labkit.errors import DataError, TrainingError
from labkit.objectives import Collator, generator, loss
from labkit.run_folder import Log, RunFolder, process_count, to_stderr
from labkit.training import Items, preset, save_model, settled, steps, train

END, PAD, MASK = "<|endoftext|>", "<pad>", "<mask>"  # ids 0, 1, 2; <mask> is for a later training


@dataclass(frozen=True)
class Shape:
    """The size of the GPT-2 to be trained. `head_width` is 64, as in every GPT-2."""

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

    Args:
        settings: hyperparameters of `labkit.training.preset`.
        held_out: the last fraction of each text, which is never trained on; bits per byte are measured there.
        repeats, first_length: of the `Curriculum`.
        resume: continue the run in `output_dir`.

    Raises:
        DataError: no text, or less of it than one row. TrainingError: see `RunFolder.alone` and `training.train`.
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
    if (done := RunFolder.finished(output_dir, config, resume=resume, log=log)) is not None:
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

    def scores(model: nn.Module) -> dict[str, float]:
        return {name: bits_per_byte(model, tokenizer, text) for name, text in held.items()}

    def evaluate(model: nn.Module) -> dict[str, float]:
        log("  " + sample(model, tokenizer, seed=settings["seed"]))
        return {"bits_per_byte": statistics.fmean(scores(model).values())} if held else {}

    rows = n_steps * settings["gradient_accumulation_steps"] * process_count() * settings["per_device_train_batch_size"]
    curriculum = Curriculum(rows, shape.context, first_length, repeats)
    make_row = row_maker(ids, curriculum, settings["seed"])
    with RunFolder.alone(output_dir, config, resume=resume) as run:
        outcome = train(
            model,
            Items(rows, lambda k: {"row": k, "ids": make_row(k)}),
            collate=in_pieces(Collator("next", pad_id=tokenizer.pad_token_id), curriculum),
            loss=lambda model, batch: loss(model, batch, "next"),
            settings=settings,
            run=run,
            tokens=lambda k: shape.context,
            evaluate=evaluate,
            log=log,
        )
        save_model(model, tokenizer, run)
        run.write_json("trainer_state.json", {"log_history": outcome.pop("history")})
        with evaluating(model):
            metrics = outcome | {"bits_per_byte": scores(model)}
        metrics |= {"n_train": len(ids), "n_eval": n_eval, "parameters": model.num_parameters()}
        run.write_json("metrics.json", metrics)
        return metrics


@dataclass(frozen=True)
class Curriculum:
    """How the rows of a run change as it goes on, so that heads which attend to earlier tokens form quickly.

    Attributes:
        rows: of the whole run. context: tokens per row.
        first_length: for the first half of the run each row is cut into pieces of this many tokens, which do not attend
            to each other. The pieces then double in equal stages, and are whole rows in the last fifth.
        repeats: fraction of the pieces that repeat one passage, half of them a passage of random tokens. It falls to a
            tenth by the middle of the run.
    """

    rows: int
    context: int
    first_length: int | None = None
    repeats: float = 0.0

    def length(self, row: int) -> int:
        """Tokens per piece of row number `row`."""
        first, done = self.first_length or self.context, row / self.rows
        doublings = math.ceil(math.log2(self.context / first)) if first < self.context else 0
        if done >= 0.8 or not doublings:
            return self.context
        stage = 0 if done < 0.5 or doublings == 1 else 1 + int((done - 0.5) / 0.3 * (doublings - 1))
        return first * 2**stage

    def share_of_repeats(self, row: int) -> float:
        """The probability that a piece of row number `row` repeats a passage."""
        return self.repeats * max(0.1, 1 - 2 * row / self.rows)


def row_maker(ids: Tensor, curriculum: Curriculum, seed: int) -> Callable[[int], Tensor]:
    """`make(k)`: row k of the run, a pure function of (seed, k).

    Each pass reads every token once, cuts the ids into rows at another offset, and takes them in another order.
    """
    length, known = curriculum.context, ids.unique()
    per_pass = (len(ids) - 1) // length

    def make(row: int) -> Tensor:
        rng = generator(seed, -1 - row // per_pass)
        offset = int(torch.randint(len(ids) - per_pass * length, (), generator=rng))
        start = offset + int(torch.randperm(per_pass, generator=rng)[row % per_pass]) * length
        rng = generator(seed + 1, row)
        pieces = ids[start : start + length].split(curriculum.length(row))
        repeated = torch.rand(len(pieces), generator=rng) < curriculum.share_of_repeats(row)
        return torch.cat([_repeated(p, known, rng) if r else p for p, r in zip(pieces, repeated, strict=True)])

    return make


def in_pieces(collate: Callable[[list[dict]], Any], curriculum: Curriculum) -> Callable[[list[dict]], Any]:
    """`collate`, given each row's pieces in place of the row."""

    def collated(rows: list[dict]) -> Any:
        length = curriculum.length(min(row["row"] for row in rows))
        return collate([row | {"ids": piece} for row in rows for piece in row["ids"].split(length)])

    return collated


def _repeated(piece: Tensor, known: Tensor, rng: torch.Generator) -> Tensor:
    """One passage of 4 to 64 tokens (up to 3/8 of the piece) again and again: the text's, or random known tokens.

    Random tokens can only be predicted from their earlier occurrence; in a text there are easier ways.
    """
    longest = max(1, min(64, 3 * len(piece) // 8))
    length = int(torch.randint(min(4, longest), longest + 1, (), generator=rng))
    drawn = known[torch.randint(len(known), (length,), generator=rng)]
    passage = drawn if float(torch.rand((), generator=rng)) < 0.5 else piece[:length]
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
def bits_per_byte(model: nn.Module, tokenizer: Any, text: str, batch_size: int = 8) -> float:
    """The bits that the model needs per byte of `text`; every token but the first counts once.

    Windows of the model's context advance by half of it, so that a token has at least half a context before it.
    """
    ids = encode_all(tokenizer, [text])[:-1]
    context = model.config.n_positions
    overlap = context - context // 2  # what an earlier window has counted
    windows = [ids[start : start + context] for start in range(0, max(1, len(ids) - overlap), context // 2)]
    labels = [window.clone() for window in windows]
    for counted in labels[1:]:
        counted[:overlap] = -100
    nats = 0.0
    for first in range(0, len(windows), batch_size):
        batch = slice(first, first + batch_size)
        inputs = nn.utils.rnn.pad_sequence(windows[batch], batch_first=True)
        targets = nn.utils.rnn.pad_sequence(labels[batch], batch_first=True, padding_value=-100)
        if count := int((targets[:, 1:] != -100).sum()):
            nats += count * float(model(inputs.to(model.device), labels=targets.to(model.device), use_cache=False).loss)
    return nats / math.log(2) / len(text.encode())


def sample(model: Any, tokenizer: Any, prompt: str = "\n", tokens: int = 40, seed: int = 0) -> str:
    """A continuation of `prompt` on one line, drawn with a fixed seed; both fit into the context."""
    context = model.config.n_positions
    ids = torch.tensor([tokenizer(prompt, verbose=False)["input_ids"][1 - context :]], device=model.device)
    tokens = min(tokens, context - ids.shape[1])
    with random_state_kept(seed):
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=True, top_k=40, pad_token_id=1,
            suppress_tokens=[tokenizer.pad_token_id, tokenizer.mask_token_id],  # they occur in no text
        )  # fmt: skip
    text = tokenizer.decode(out[0, ids.shape[1] :]).strip().replace("\n", " / ")
    return "".join(letter if letter.isprintable() else "�" for letter in text)  # a terminal obeys control characters
