"""Attention over several texts in one row, computed text by text: no work and no mask cells for pairs of texts.

On a CPU the kernel of `scaled_dot_product_attention` computes every cell of a mask, also those between two texts. Here
the mask is a tensor subclass that lists the texts, and PyTorch hands the kernel call to it (`__torch_function__`,
https://docs.pytorch.org/docs/stable/notes/extending.html), so that the kernel is called once per text.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as attend

from labkit.errors import ConversionError, MaskError
from labkit.masks import Mask, self_for_empty_rows

_ASKED = {getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "is_cuda", "requires_grad")}
_ASKED |= {Tensor.dim, Tensor.size}


class TextMask(Tensor):
    """Stands for the bool mask (1, 1, tokens, tokens) in which each text attends to itself alone, by `rule`.

    It has no cells. Only the attention kernel may use it; anything else that would read its cells is an error.
    """

    rule: Mask | None
    lengths: list[int]

    @staticmethod
    def of(rule: Mask | None, lengths: list[int], device: Any, rows: int = 1) -> TextMask:
        """Texts of these lengths side by side. The rule None stands for a mask that each layer is still to be given."""
        size = (rows, 1, sum(lengths), sum(lengths))
        self = torch.zeros(1, dtype=torch.bool, device=device).expand(size).as_subclass(TextMask)
        self.rule, self.lengths, self.cells = rule, lengths, None
        if rule is not None and rule.batch_size not in (None, rows):
            raise MaskError(f"{rule} is for a batch of {rule.batch_size} rows, and this batch is packed into {rows}")
        return self

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function in _ASKED:
            return super().__torch_function__(function, types, args, kwargs)
        if function is attend:
            given = dict(zip(("query", "key", "value", "attn_mask", "dropout_p", "is_causal"), args, strict=False))
            return _by_text(**given, **kwargs)
        if function is Tensor.__getitem__ and all(_is_whole(part, args[0].shape[-1]) for part in args[1]):
            return args[0]
        raise ConversionError(
            f"this model's attention does more with its mask than hand it to the kernel ({function.__name__}), so "
            "texts cannot be attended to one by one: load the model with attn='eager'"
        )

    def of_text(self, length: int) -> dict[str, Any]:
        """What the kernel is given for a text of this length: no mask where its own flags will do."""
        kind, *details = self.rule.identity
        if kind in ("bidirectional", "causal"):
            return {"is_causal": kind == "causal"}
        if kind == "sliding_window" and length <= details[0]:
            return {"is_causal": details[1]}
        if self.cells is None:
            n = max(*self.lengths, self.rule.needs)
            self.cells = self.rule.dense(n, device=self.device).view(1, n, n)
        return {"attn_mask": self_for_empty_rows(self.cells[:, :length, :length])[None]}


def _by_text(query: Tensor, key: Tensor, value: Tensor, attn_mask: TextMask, dropout_p=0.0, is_causal=False, **others):
    """`scaled_dot_product_attention` of (1, heads, tokens, dim), for each text alone."""
    if attn_mask.rule is None:
        raise ConversionError("a layer of packed texts was given no mask of its own")
    texts = zip(*(states.split(attn_mask.lengths, dim=2) for states in (query, key, value)), strict=True)
    outputs = [
        attend(*text, dropout_p=dropout_p, **attn_mask.of_text(length), **others)
        for text, length in zip(texts, attn_mask.lengths, strict=True)
    ]
    return torch.cat(outputs, dim=2)


def _is_whole(part: Any, size: int) -> bool:
    return isinstance(part, slice) and part.start in (None, 0) and part.step is None and part.stop in (None, size)
