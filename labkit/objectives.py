"""What a language model is trained to predict: next token, MLM, MNTP, prefix-LM and hybrid.

One convention for all of them: `targets[i]` is the token that the logits **at position i** predict, or IGNORE. No loss
contains a hidden shift. For the sentence `the cat sat down`, with `sat` masked:

    next-token   the  cat  sat  down        MLM   the  cat  [M]  down       MNTP  the  cat  [M]  down
    targets      cat  sat  down  -                 -    -   sat   -               -   sat   -    -
    mask         causal                           bidirectional                   bidirectional

An objective is a function of one row of token ids and a random generator. `Collator` makes batches in which row k of a
run does not depend on the number of workers or on a resume. `loss` is the loss of every objective.

Sources: MLM, Devlin et al. 2019 (BERT); whole words, the same authors' later release; MNTP, BehnamGhader et al. 2024
(LLM2Vec); prefix-LM, Raffel et al. 2020 (T5).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from labkit import masks
from labkit.errors import DataError, require_one_of
from labkit.masks import Mask

IGNORE = -100  # the target of a position that is not counted, as in torch's cross_entropy


@dataclass(frozen=True)
class Example:
    """One row: the input, the token to predict at each position, and the mask."""

    inputs: Int[Tensor, " seq"]
    targets: Int[Tensor, " seq"]
    mask: Mask


@dataclass(frozen=True)
class Corruption:
    """How tokens are hidden: which can be chosen, how many, and what replaces them.

    Attributes:
        mask_id: the mask token.
        vocab_size: random replacements are drawn from the ids below it, `protected` ones excepted.
        rate: share of the candidates that is chosen; at least one is.
        protected: ids that are never chosen and never drawn (pad, eos, the mask token itself, ...).
        word_starts: (vocab_size,) True = a token that begins a word; whole words are then chosen. None: single tokens.
        replace: of the chosen tokens, the shares that become the mask token and a random token; the rest stay.
    """

    mask_id: int
    vocab_size: int
    rate: float = 0.15
    protected: tuple[int, ...] = ()
    word_starts: Tensor | None = None
    replace: tuple[float, float] = (0.8, 0.1)

    def __post_init__(self) -> None:
        if not 0 < self.rate <= 1:
            raise DataError(f"the mask rate is a share, above 0 and at most 1, not {self.rate}")
        if not 0 <= self.mask_id < self.vocab_size:
            raise DataError(f"mask token {self.mask_id} is outside the vocabulary of {self.vocab_size} tokens")

    def choose(self, ids: Int[Tensor, " seq"], rng: torch.Generator, first: int = 0) -> Bool[Tensor, " seq"]:
        """Which positions to hide, none before `first`: a share `rate` of the candidates, and at least one."""
        candidates = ~torch.isin(ids, torch.tensor(self.protected, dtype=ids.dtype))
        candidates[:first] = False
        budget = max(1, round(self.rate * int(candidates.sum())))
        # a unit is a word, or each token by itself; units are taken in random order until the budget is spent
        units = torch.arange(len(ids)) if self.word_starts is None else self.word_starts[ids].long().cumsum(0)
        order = torch.randperm(int(units.max()) + 1, generator=rng)
        size = torch.zeros(len(order), dtype=torch.long).index_add(0, units, candidates.long())[order]
        before = size.cumsum(0) - size  # tokens chosen before this unit's turn
        chosen = torch.zeros(len(order), dtype=torch.bool)
        chosen[order] = before < budget
        return chosen[units] & candidates

    def hide(self, ids: Int[Tensor, " seq"], chosen: Bool[Tensor, " seq"], rng: torch.Generator) -> Int[Tensor, " seq"]:
        """`ids` with the chosen tokens replaced; by default 80 % become the mask token, 10 % a random one (BERT)."""
        draw = torch.rand(len(ids), generator=rng)
        masked, randomised = self.replace
        allowed = torch.ones(self.vocab_size, dtype=torch.bool)
        allowed[list(self.protected)] = False
        allowed = allowed.nonzero()[:, 0]
        random_ids = allowed[torch.randint(len(allowed), ids.shape, generator=rng)].to(ids.dtype)
        hidden = torch.where(chosen & (draw < masked), self.mask_id, ids)
        return torch.where(chosen & (draw >= masked) & (draw < masked + randomised), random_ids, hidden)


def next_token(ids: Int[Tensor, " seq"]) -> Example:
    """Every position predicts the token after it; the last has none. Causal."""
    return Example(ids, _shifted(ids), masks.causal())


def masked_lm(ids: Int[Tensor, " seq"], corruption: Corruption, rng: torch.Generator) -> Example:
    """MLM: the logits at the position of a hidden token predict it. Bidirectional."""
    chosen = corruption.choose(ids, rng)
    targets = torch.where(chosen, ids, IGNORE)
    return Example(corruption.hide(ids, chosen, rng), targets, masks.bidirectional())


def mntp(ids: Int[Tensor, " seq"], corruption: Corruption, rng: torch.Generator) -> Example:
    """MNTP: the logits *before* a hidden token predict it, as in the pre-training of a decoder. Bidirectional.

    The first token has no position before it and is never hidden.
    """
    chosen = corruption.choose(ids, rng, first=1)
    targets = _shifted(torch.where(chosen, ids, IGNORE))
    return Example(corruption.hide(ids, chosen, rng), targets, masks.bidirectional())


def prefix_lm(ids: Int[Tensor, " seq"], n: int) -> Example:
    """The first `n` tokens attend in both directions, the rest is predicted token by token."""
    _require_inside(n, ids, "prefix")
    targets = _shifted(ids)
    targets[: max(n - 1, 0)] = IGNORE  # position n - 1 predicts token n; earlier positions attend to their target
    return Example(ids, targets, masks.prefix(n))


def hybrid_lm(ids: Int[Tensor, " seq"], n: int, corruption: Corruption, rng: torch.Generator) -> Example:
    """The first `n` tokens are causal, with next-token targets; the rest is bidirectional, with the targets of MNTP."""
    _require_inside(n, ids, "causal part")
    chosen = corruption.choose(ids, rng, first=n)
    targets = _shifted(ids)
    targets[max(n - 1, 0) :] = _shifted(torch.where(chosen, ids, IGNORE))[max(n - 1, 0) :]
    return Example(corruption.hide(ids, chosen, rng), targets, masks.hybrid(n))


@dataclass(frozen=True)
class Objective:
    """A way of training. `attention` is the mask that its model needs: "causal", "bidirectional" or "per row"."""

    attention: str
    hides_tokens: bool


OBJECTIVES = {
    "next": Objective("causal", hides_tokens=False),
    "mlm": Objective("bidirectional", hides_tokens=True),
    "mntp": Objective("bidirectional", hides_tokens=True),
    "prefix": Objective("per row", hides_tokens=False),
    "hybrid": Objective("per row", hides_tokens=True),
}


def by_name(name: str) -> Objective:
    """The objective called `name`."""
    require_one_of("the objective", name, OBJECTIVES)
    return OBJECTIVES[name]


@dataclass
class Collator:
    """Makes batches of one objective from rows of token ids.

    Called with a list of `{"row": k, "ids": [...]}`; returns `input_ids`, `labels`, `attention_mask` (batch, seq), and
    `lengths` (batch,) for "prefix" and "hybrid": where the bidirectional prefix, or the causal part, ends. Row k is
    corrupted by a generator seeded with (`seed`, k), so every worker and every resumed run makes the same row.
    """

    objective: str
    pad_id: int
    corruption: Corruption | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if by_name(self.objective).hides_tokens and self.corruption is None:
            raise DataError(f"{self.objective} hides tokens and needs a Corruption, such as corruption_for(tokenizer)")

    def __call__(self, rows: Sequence[dict]) -> dict[str, Tensor]:
        examples, lengths = zip(*(self._example(row) for row in rows), strict=True)
        inputs = [example.inputs for example in examples]
        batch = {
            "input_ids": pad_sequence(inputs, batch_first=True, padding_value=self.pad_id),
            "labels": pad_sequence([example.targets for example in examples], batch_first=True, padding_value=IGNORE),
            "attention_mask": pad_sequence([torch.ones_like(ids) for ids in inputs], batch_first=True),
        }
        return batch | ({"lengths": torch.tensor(lengths)} if by_name(self.objective).attention == "per row" else {})

    def _example(self, row: dict) -> tuple[Example, int]:
        """The example of a row, and the length of its prefix or causal part."""
        ids, rng = torch.as_tensor(row["ids"]), generator(self.seed, row["row"])
        if len(ids) < 2:
            raise DataError(f"row {row['row']} has {len(ids)} token(s): there is nothing to predict in it")
        if self.objective == "next":
            return next_token(ids), 0
        if self.objective in ("mlm", "mntp"):
            return (masked_lm if self.objective == "mlm" else mntp)(ids, self.corruption, rng), 0
        n = int(torch.randint(1, len(ids), (), generator=rng))
        return (prefix_lm(ids, n) if self.objective == "prefix" else hybrid_lm(ids, n, self.corruption, rng)), n


def loss(model: nn.Module, batch: dict[str, Tensor], objective: str) -> Float[Tensor, ""]:
    """Mean cross entropy in nats over the counted positions of a batch, of a transformers model with a language head.

    "next", "mlm" and "mntp" use the model's own attention (convert it first: `labkit.to_bidirectional`); for "prefix"
    and "hybrid" the mask of the batch is put in force for this pass.
    """
    from labkit.decoder.hooks import masked

    counted = batch["labels"] != IGNORE
    if not bool(counted.any()):
        raise DataError(f"under {objective} no position of this batch is counted: there is nothing to predict")
    in_force = nullcontext()
    if by_name(objective).attention == "per row":
        mask = masks.prefix if objective == "prefix" else masks.hybrid
        in_force = masked(model, mask(batch["lengths"].tolist()))
    with in_force:
        logits = logits_at(model, batch["input_ids"], batch.get("attention_mask"), counted)
    return F.cross_entropy(logits.float(), batch["labels"][counted])


def logits_at(
    model: nn.Module,
    input_ids: Int[Tensor, "batch seq"],
    attention_mask: Tensor | None,
    positions: Bool[Tensor, "batch seq"],
) -> Float[Tensor, "chosen vocab"]:
    """The logits at the chosen positions only, because a large vocabulary makes logits expensive."""
    if attention_mask is not None and bool(attention_mask.all()):
        attention_mask = None
    head = getattr(model, "module", model).get_output_embeddings()
    handle = head.register_forward_pre_hook(lambda _, args: (args[0][positions][None],))  # (1, chosen, width)
    try:
        return model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits[0]
    finally:
        handle.remove()


def generator(seed: int, row: int) -> torch.Generator:
    """A random generator that depends only on (seed, row)."""
    digest = hashlib.sha256(f"{seed}:{row}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8]) >> 1)


def word_starts(tokenizer: Any) -> Bool[Tensor, " vocab"]:
    """Which tokens begin a word: those with a space before them (Ġ, ▁), and all that do not begin with a letter.

    A byte-level tokenizer writes line ends and tabs as letters (Ċ, č, ĉ), so these are listed.
    """
    tokens = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    return torch.tensor([token[:1] in tuple("Ġ▁Ċčĉ") or not token[:1].isalpha() for token in tokens])


def corruption_for(tokenizer: Any, rate: float = 0.15, whole_words: bool = False) -> Corruption:
    """The Corruption of a tokenizer that has a mask token (see `labkit.tasks.lm.ensure_mask_token`)."""
    if tokenizer.mask_token_id is None:
        spelled = tokenizer.convert_ids_to_tokens(tokenizer.encode("[MASK]", add_special_tokens=False)[0])
        raise DataError(
            f"this tokenizer has no mask token (spelling it out does not make one: [MASK] begins with {spelled!r}); "
            "add one with labkit.tasks.lm.ensure_mask_token(model, tokenizer)"
        )
    return Corruption(
        mask_id=tokenizer.mask_token_id,
        vocab_size=len(tokenizer),
        rate=rate,
        protected=tuple(sorted(set(tokenizer.all_special_ids))),
        word_starts=word_starts(tokenizer) if whole_words else None,
    )


def _shifted(ids: Tensor) -> Tensor:
    return torch.cat([ids[1:], ids.new_tensor([IGNORE])])


def _require_inside(n: int, ids: Tensor, what: str) -> None:
    if not 0 <= n < len(ids):
        raise DataError(f"a {what} of {n} tokens leaves nothing to predict in a row of {len(ids)}")
