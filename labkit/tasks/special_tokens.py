"""The tokens that are no text: what a row begins and ends with, and the marks of a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def row_ends(tokenizer: Any) -> tuple[list[int], list[int]]:
    """What a row begins and what it ends with: bos and eos, or [CLS] and [SEP] of an encoder; empty without either."""
    begin = tokenizer.cls_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    end = tokenizer.sep_token_id if tokenizer.eos_token_id is None else tokenizer.eos_token_id
    return [] if begin is None else [begin], [] if end is None else [end]


def between(tokenizer: Any) -> list[int]:
    """What an encoder's tokenizer puts between two texts of a row: [SEP], RoBERTa's twice; empty of a decoder's."""
    if tokenizer.cls_token_id is None or tokenizer.sep_token_id is None:
        return []
    around = 2  # one token before the first text, one after the last
    return [tokenizer.sep_token_id] * (tokenizer.num_special_tokens_to_add(pair=True) - around)


def add_tokens(model: Any, tokenizer: Any, marks: Sequence[str]) -> int:
    """Make each mark one token, and its embedding the mean of all; returns how many were new."""
    new = tokenizer.add_tokens([mark for mark in marks if mark not in tokenizer.get_vocab()], special_tokens=True)
    if len(tokenizer) > model.get_input_embeddings().num_embeddings:
        fit_embeddings(model, tokenizer)
    return new


def fit_embeddings(model: Any, tokenizer: Any) -> None:
    """An embedding for each token of the tokenizer. A new one is the mean of all others.

    A new row drawn at random can be far from all others (Hewitt 2021). The mean is where an unknown word would be.
    """
    import torch  # here, as a row's ends need none of it, and the command line knows its options without

    before = model.get_input_embeddings().num_embeddings
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    with torch.no_grad():
        tables = (model.get_input_embeddings(), model.get_output_embeddings())
        for table in {id(t): t for t in tables if t is not None}.values():
            table.weight[before:] = table.weight[:before].mean(0)
