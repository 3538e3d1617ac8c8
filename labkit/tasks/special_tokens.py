"""Marks of a prompt as tokens of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def add_tokens(model: Any, tokenizer: Any, marks: Sequence[str]) -> int:
    """Make each mark one token, and its embedding the mean of all; returns how many were new.

    A new row drawn at random can be far from all others (Hewitt 2021); the mean is where an unknown word would be.
    """
    new = tokenizer.add_tokens([mark for mark in marks if mark not in tokenizer.get_vocab()], special_tokens=True)
    table = model.get_input_embeddings()
    if len(tokenizer) > table.num_embeddings:
        before = table.num_embeddings
        model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
        with torch.no_grad():
            tables = (model.get_input_embeddings(), model.get_output_embeddings())
            for each in {id(t): t for t in tables if t is not None}.values():
                each.weight[before:] = each.weight[:before].mean(0)
    return new
