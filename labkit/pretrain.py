"""Train a small GPT-2 from nothing on any text: tokenizer, rows, model, and what it costs to say a byte.

`pretrain(["my-texts/"], "run")`, or `labkit pretrain my-texts --output-dir run`. This is how gpt2-mini was made.
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from labkit.datasets.text import read_documents
from labkit.decoder.running import evaluating
from labkit.errors import DataError, TrainingError, reading
from labkit.objectives import Collator, loss
from labkit.pretraining_rows import Curriculum, in_pieces, row_maker
from labkit.run_folder import RunFolder, is_first_process, process_count
from labkit.training import Settings, random_state_kept, require, save_model, train

END, PAD, MASK = "<|endoftext|>", "<pad>", "<mask>"  # ids 0, 1, 2; <mask> waits for a later training


@dataclass(frozen=True)
class Shape:
    """The size of the GPT-2 to be trained. `head_width` is 64, as in every GPT-2."""

    vocab_size: int = 4096
    context: int = 512
    width: int = 256
    layers: int = 6
    dropout: float = 0.1

    def __post_init__(self) -> None:
        if self.width < 64 or self.width % 64:
            raise TrainingError(f"width {self.width} is no multiple of 64, the width of a GPT-2 head")
        if self.context < 2 or self.layers < 1 or not 0 <= self.dropout < 1:
            raise TrainingError(
                f"context {self.context} must be at least 2 tokens, layers {self.layers} at least 1, "
                f"dropout {self.dropout} in [0, 1)"
            )
        if self.vocab_size < 256 + 3:
            raise TrainingError(
                f"a byte-level vocabulary needs 256 bytes and 3 special tokens; {self.vocab_size} is less"
            )


def pretrain(
    texts: Sequence[str | Path],
    output_dir: str | Path,
    *,
    shape: Shape | None = None,
    settings: Settings | None = None,
    held_out: float = 0.1,
    repeats: float = 0.0,
    first_length: int | None = None,
    resume: bool = False,
    say: Callable[[str], None] = lambda text: print(text, file=sys.stderr),
) -> dict[str, Any]:
    """Train a tokenizer and a GPT-2 on `texts` (files and folders); returns the metrics and leaves a run folder.

    Args:
        held_out: the last share of each text, which is never trained on; bits per byte are measured there.
        repeats: share of what is read, at the beginning, that says a short passage again and again, half of them
            passages of random tokens, so that heads which look for an earlier occurrence form within a short training.
            It falls to a tenth by the middle of the run.
        first_length: begin with rows cut into pieces of this many tokens, which grow to whole rows: see `Curriculum`.
        resume: go on with the run in `output_dir`.

    Raises:
        DataError: no text, or less of it than one row. TrainingError: see `RunFolder.open` and `training.train`.
    """
    shape, settings = shape or Shape(), settings or Settings(max_steps=2000, batch_size=8)
    require(settings)
    say = say if is_first_process() else (lambda text: None)
    documents = read_documents(texts)
    if not 0 <= held_out < 1 or not 0 <= repeats <= 1:
        raise TrainingError(f"held-out share {held_out} must be in [0, 1), share of repeated rows {repeats} in [0, 1]")
    if first_length is not None and not 2 <= first_length <= shape.context:
        raise TrainingError(f"the first rows' length {first_length} must be 2 to the context, {shape.context} tokens")
    config = {
        "command": "pretrain", "texts": {d.name: hashlib.sha256(d.text.encode()).hexdigest() for d in documents},
        "shape": asdict(shape), "settings": asdict(settings), "held_out": held_out, "repeats": repeats,
        "first_length": first_length,
    }  # fmt: skip
    run = RunFolder.check(output_dir, config, resume=resume)
    if run.metrics is not None:
        say(f"{run.path} is finished: {settings.max_steps:,} steps")
        return run.metrics
    parts = [document.split(held_out) for document in documents]
    tokenizer = _tokenizer_of(run, [train_part for train_part, _ in parts], shape)
    ids = encode_all(tokenizer, [train_part for train_part, _ in parts])
    if len(ids) <= shape.context:  # before anything is written
        raise DataError(f"the text has {len(ids):,} tokens to train on, and one row takes {shape.context:,}: add text")
    with RunFolder.alone(output_dir, config, resume=resume) as run:
        if not (run.path / "tokenizer").is_dir():
            run.write_folder("tokenizer", tokenizer.save_pretrained)
        held = {document.name: part for document, (_, part) in zip(documents, parts, strict=True) if part.strip()}
        n_eval = sum(len(text.encode()) for text in held.values())
        say(f"{len(documents)} text(s): {len(ids):,} tokens to train on, {n_eval:,} bytes held out")
        model = new_model(shape, settings.seed)
        say(f"GPT-2 of {model.num_parameters() / 1e6:.1f} M parameters, {settings.max_steps:,} steps")

        def evaluate(model: nn.Module) -> dict[str, float]:
            say("  " + sample(model, tokenizer, seed=settings.seed))
            return {"val_loss": validation_loss(model, tokenizer, held.values(), rows=32)} if held else {}

        rows = settings.max_steps * settings.rows_per_step * process_count()
        curriculum = Curriculum(rows, shape.context, first_length, repeats)
        outcome = train(
            model,
            row_maker(ids, curriculum, settings.seed),
            collate=in_pieces(Collator("next", pad_id=tokenizer.pad_token_id, seed=settings.seed), curriculum),
            loss=lambda model, batch: loss(model, batch, "next"),
            settings=settings,
            run=run,
            evaluate=evaluate,
            say=say,
        )
        save_model(model, tokenizer, run)
        run.write_json("trainer_state.json", {"log_history": outcome.pop("history")})
        with evaluating(model):
            scores = {name: bits_per_byte(model, tokenizer, text) for name, text in held.items()}
        metrics = outcome | {
            "bits_per_byte": scores,
            "steps": settings.max_steps,
            "n_train": len(ids),
            "n_eval": n_eval,
            "parameters": model.num_parameters(),
        }
        run.write_json("metrics.json", metrics)
        return metrics


def train_tokenizer(texts: Sequence[str], vocab_size: int, context: int) -> Any:
    """A byte-level BPE of at most `vocab_size` tokens: any text goes in and comes back unchanged.

    It has a pad token of its own (a pad that is also the end of text cannot be told from it) and a mask token.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    mask = AddedToken(MASK, lstrip=True, special=True)  # the space before it belongs to it, as to a word
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END, PAD, mask],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=END, eos_token=END, pad_token=PAD, mask_token=mask, padding_side="right",
        model_max_length=context, clean_up_tokenization_spaces=False,
    )  # fmt: skip


def encode_all(tokenizer: Any, texts: Sequence[str]) -> Tensor:
    """All texts as one line of token ids, each ended by the end-of-text token. Shape (tokens,), int64."""
    ids: list[int] = []
    for text in texts:
        ids += tokenizer(text, verbose=False)["input_ids"]
        ids.append(tokenizer.eos_token_id)
    return torch.tensor(ids)


def new_model(shape: Shape, seed: int) -> Any:
    """A GPT-2 with fresh weights, set so that heads form within minutes rather than hours. All of it is trained.

    - GPT-2's own deviation of 0.02 suits a width of 768 and more; here matrices start at 1 / sqrt(width), divided by
      sqrt(2 layers) where they add to the residual stream.
    - Position embeddings start as sinusoids (Vaswani et al. 2017) of twice the size of token embeddings.
    - Keys start similar to queries, and what a head writes similar to what it read, as they are in trained models
      (Trockman and Kolter 2023, "Mimetic Initialization of Self-Attention Layers", but with a positive value product).

    Attention probabilities are not dropped: SDPA's fast path on a CPU has no dropout.
    """
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=shape.vocab_size, n_positions=shape.context, n_embd=shape.width, n_layer=shape.layers,
        n_head=shape.width // 64, resid_pdrop=shape.dropout, embd_pdrop=shape.dropout, attn_pdrop=0.0,
        bos_token_id=0, eos_token_id=0, pad_token_id=1,
    )  # fmt: skip
    with random_state_kept():
        torch.manual_seed(seed)
        model = GPT2LMHeadModel(config)
        wide = 1 / math.sqrt(shape.width) / config.initializer_range
        with torch.no_grad():
            model.transformer.wpe.weight.copy_(2 * config.initializer_range * math.sqrt(2) * _sinusoids(shape))
            for block in model.transformer.h:
                for weight in (p for p in block.parameters() if p.ndim == 2):
                    weight.mul_(wide)
                query, key, value = block.attn.c_attn.weight.split(shape.width, dim=1)  # 3 x (width, width), views
                key.mul_(math.sqrt(1 - 0.7**2)).add_(query, alpha=0.7)
                nn.init.orthogonal_(value)
                block.attn.c_proj.weight.add_(value.T, alpha=0.5)
    return model


def _sinusoids(shape: Shape) -> Tensor:
    """(context, width): sines and cosines, of wavelengths from 2 pi to 2 pi times the context."""
    frequency = shape.context ** -torch.linspace(0, 1, shape.width // 2)
    angle = torch.arange(shape.context)[:, None] * frequency
    return torch.cat([angle.sin(), angle.cos()], dim=1)


@torch.no_grad()
def bits_per_byte(model: nn.Module, tokenizer: Any, text: str, batch_size: int = 8) -> float:
    """How many bits the model needs per byte of `text`, every token but the first counted once.

    Windows of the model's context advance by half of it, so that a token has at least half a context before it (at the
    text's beginning: what there is).
    """
    ids = encode_all(tokenizer, [text])[:-1]
    context = model.config.n_positions
    overlap = context - context // 2  # what an earlier window has counted
    nats = 0.0
    windows = [ids[start : start + context] for start in range(0, max(1, len(ids) - overlap), context // 2)]
    for first in range(0, len(windows), batch_size):
        batch = windows[first : first + batch_size]
        padded = nn.utils.rnn.pad_sequence(batch, batch_first=True).to(model.device)
        logits = model(padded, use_cache=False).logits.float()
        for i, window in enumerate(batch):
            seen = 1 if first + i == 0 else overlap
            counted = window[seen:].to(model.device)
            nats += float(F.cross_entropy(logits[i, seen - 1 : len(window) - 1], counted, reduction="sum"))
    return nats / math.log(2) / len(text.encode())


@torch.no_grad()
def validation_loss(model: nn.Module, tokenizer: Any, texts: Any, rows: int) -> float:
    """Mean nats per token over `rows` full contexts spread evenly over the texts."""
    ids = encode_all(tokenizer, list(texts))
    context = min(model.config.n_positions, len(ids))
    starts = torch.linspace(0, len(ids) - context, rows).long().tolist()
    batch = torch.stack([ids[start : start + context] for start in starts]).to(model.device)
    losses = [
        F.cross_entropy(model(part, use_cache=False).logits[:, :-1].flatten(0, 1).float(), part[:, 1:].flatten())
        for part in batch.split(8)
    ]
    return float(torch.stack(losses).mean())


def sample(model: Any, tokenizer: Any, prompt: str = "\n", tokens: int = 40, seed: int = 0) -> str:
    """A continuation of `prompt` on one line, drawn with a fixed seed; both fit into the context."""
    context = model.config.n_positions
    ids = torch.tensor([tokenizer(prompt, verbose=False)["input_ids"][1 - context :]], device=model.device)
    tokens = min(tokens, context - ids.shape[1])
    with random_state_kept():
        torch.manual_seed(seed)
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=True, top_k=40, pad_token_id=1,
            suppress_tokens=[tokenizer.pad_token_id, tokenizer.mask_token_id],  # they occur in no text
        )  # fmt: skip
    text = tokenizer.decode(out[0, ids.shape[1] :]).strip().replace("\n", " / ")
    return "".join(letter if letter.isprintable() else "�" for letter in text)  # a terminal obeys control characters


def _tokenizer_of(run: RunFolder, texts: list[str], shape: Shape) -> Any:
    """The run's tokenizer: trained once, kept in the run, read again by a resumed one."""
    from transformers import PreTrainedTokenizerFast

    if not (run.path / "tokenizer").is_dir():
        return train_tokenizer(texts, shape.vocab_size, shape.context)
    with reading(f"the tokenizer in {run.path}", TrainingError):
        return PreTrainedTokenizerFast.from_pretrained(run.path / "tokenizer")
