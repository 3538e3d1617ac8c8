"""The tokens that are not text: those at the ends of a row, those between two texts, and the marks of a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def row_ends(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The ids before and after the text of a row: bos and eos, or [CLS] and [SEP] of an encoder; empty if neither."""
    first = tokenizer.cls_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    last = tokenizer.sep_token_id if tokenizer.eos_token_id is None else tokenizer.eos_token_id
    return [] if first is None else [first], [] if last is None else [last]


def between(tokenizer: Any) -> list[int]:
    """The ids that an encoder's tokenizer puts between two texts: [SEP], twice for RoBERTa; empty for a decoder."""
    if tokenizer.cls_token_id is None or tokenizer.sep_token_id is None:
        return []
    return [tokenizer.sep_token_id] * (tokenizer.num_special_tokens_to_add(pair=True) - 2)  # without those at the ends


def add_tokens(model: Any, tokenizer: Any, marks: Sequence[str]) -> int:
    """Make each mark one token whose embedding is the mean of all others; returns the number of new tokens."""
    new = tokenizer.add_tokens([mark for mark in marks if mark not in tokenizer.get_vocab()], special_tokens=True)
    if len(tokenizer) > model.get_input_embeddings().num_embeddings:
        fit_embeddings(model, tokenizer)
    return new


def ensure_mask_token(model: Any, tokenizer: Any) -> int:
    """The id of the mask token. Where there is none (GPT-2, Gemma), Gemma's `<unused0>` is taken, or `<mask>` added."""
    from transformers import AddedToken

    if tokenizer.mask_token_id is None:
        name = "<unused0>" if "<unused0>" in tokenizer.get_vocab() else "<mask>"
        # lstrip: the space before it belongs to it, as it does to a word; left alone it would be a token of its own
        tokenizer.add_special_tokens({"mask_token": AddedToken(name, lstrip=True, special=True)})
    if tokenizer.mask_token_id >= model.get_input_embeddings().num_embeddings:
        fit_embeddings(model, tokenizer)
    return tokenizer.mask_token_id


def fit_embeddings(model: Any, tokenizer: Any) -> None:
    """Give each token of the tokenizer an embedding. A new one is the mean of all others.

    A random embedding can be far from all others, which shifts the probabilities of all tokens (Hewitt 2021).
    """
    import torch  # not at the top: the command line lists the options of the tasks without loading it

    n_old = model.get_input_embeddings().num_embeddings
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    with torch.no_grad():
        tables = (model.get_input_embeddings(), model.get_output_embeddings())
        for table in {id(table): table for table in tables if table is not None}.values():  # one if they are tied
            table.weight[n_old:] = table.weight[:n_old].mean(0)
