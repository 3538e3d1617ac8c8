"""The Mask algebra: a mask is a predicate "may query q attend to key k", with a name and an explanation.

    >>> from labkit import masks
    >>> m = masks.causal() & masks.sliding_window(3)
    >>> m
    causal() & sliding_window(3)
    >>> print(m.ascii("the cat sat down".split()))
          the  cat  sat  down
     the   ■    ·    ·    ·
     cat   ■    ■    ·    ·
     sat   ■    ■    ■    ·
    down   ·    ■    ■    ■

Masks compose with `&`, `|` and `~`, and render to a dense bool tensor (`dense`), an additive float tensor (`additive`),
a FlexAttention `BlockMask` (`block_mask`) and text (`ascii`). Three rules hold everywhere:

* **Positions.** Keys are numbered 0 .. kv_len-1. With `kv_len > q_len` (decoding with a cache) the queries are the
  *last* `q_len` positions, so query row r stands at position `kv_len - q_len + r`.
* **Equality.** `a == b` compares the expressions, `a.agrees_with(b, q_len)` the cells.
* **Rows without a key.** In `dense` such a row is all False. A softmax over nothing is NaN, so in `additive` and
  `block_mask` a query that may attend to nothing attends to **itself alone** (`self_for_empty_rows`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, no_type_check

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from labkit.errors import MaskError

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

# (batch, query, key) index tensors, broadcastable, and the number of keys -> bool tensor. `no_type_check` keeps the
# type checker of the tests away from predicates: their index tensors may have any shape.
Predicate = Callable[[Tensor, Tensor, Tensor, int], Tensor]
OPERATORS = {"&": ("and", operator.and_), "|": ("or", operator.or_)}


@dataclass(frozen=True, eq=False, repr=False)
class Mask:
    """Which query may attend to which key. Made by the factories below, not by hand.

    Attributes:
        name: the expression that makes this mask, as Python (`repr` shows it).
        meaning: a clause that completes "a token may attend to ...".
        predicate: `(batch, query, key)` positions, and the number of keys, to bool.
        identity: what `==` compares.
        batch_size: number of rows of the batch that the mask is for, or None if it is the same for every row.
        limit: longest key sequence the mask is defined for, or None.
        needs: shortest key sequence the mask makes sense for (a padded length must fit into it).
    """

    name: str
    meaning: str
    predicate: Predicate
    identity: tuple
    batch_size: int | None = None
    limit: int | None = None
    needs: int = 0

    def __repr__(self) -> str:
        return self.name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mask) and self.identity == other.identity

    def __hash__(self) -> int:
        return hash(self.identity)

    def __reduce__(self):  # a predicate cannot be pickled, the expression can
        return _from_identity, (self.identity,)

    def __and__(self, other: Mask) -> Mask:
        return _combine("&", self, other)

    def __or__(self, other: Mask) -> Mask:
        return _combine("|", self, other)

    def __invert__(self) -> Mask:
        return replace(
            self,
            name=f"~{_bracketed(self)}",
            meaning=f"every token except ({self.meaning})",
            predicate=lambda b, q, k, n: ~self.predicate(b, q, k, n),
            identity=("~", self.identity),
        )

    def __bool__(self) -> bool:
        raise MaskError("a Mask has no truth value: combine masks with &, | and ~ (not with `and`, `or`, `not`)")

    def explain(self) -> str:
        """The mask in plain language."""
        return f"{self.name}: a token may attend to {self.meaning}."

    def dense(self, q_len: int, kv_len: int | None = None, device=None) -> Bool[Tensor, "*batch query key"]:
        """The mask as bool, True = may attend: (q_len, kv_len), or (batch, q_len, kv_len) if the rows differ.

        Raises:
            MaskError: fewer keys than queries, or a length that this mask is not defined for.
        """
        q_len = _whole_number(q_len, "q_len", least=1)
        kv_len = q_len if kv_len is None else _whole_number(kv_len, "kv_len", least=1)
        if kv_len < q_len:
            raise MaskError(f"{q_len} queries with {kv_len} keys: queries are the last positions, so kv_len >= q_len")
        if self.limit is not None and kv_len > self.limit:
            raise MaskError(f"{self} is defined for {self.limit} positions, and {kv_len} were asked for")
        if kv_len < self.needs:
            raise MaskError(f"{self} is for sequences of {self.needs} or more tokens, and this one has {kv_len}")
        batch = torch.arange(self.batch_size or 1, device=device)[:, None, None]
        query = torch.arange(kv_len - q_len, kv_len, device=device)[None, :, None]
        key = torch.arange(kv_len, device=device)[None, None, :]
        cells = self.predicate(batch, query, key, kv_len).expand(self.batch_size or 1, q_len, kv_len)
        return cells.clone() if self.batch_size is not None else cells[0].clone()

    def additive(
        self, q_len: int, kv_len: int | None = None, dtype: torch.dtype = torch.float32, device=None
    ) -> Float[Tensor, "*batch query key"]:
        """The mask as a number to add to attention scores: 0 = may attend, the dtype's most negative number = may not.

        `finfo.min` rather than -inf: a row that is wholly -inf has no softmax. Shape as `dense`.
        """
        if not dtype.is_floating_point:
            raise MaskError(f"an additive mask is added to attention scores, so it needs a float dtype, not {dtype}")
        return additive_of(self_for_empty_rows(self.dense(q_len, kv_len, device=device)), dtype)

    def block_mask(self, q_len: int, kv_len: int | None = None, device="cpu") -> BlockMask:
        """The mask for `torch.nn.attention.flex_attention`, broadcast over heads."""
        cells = self_for_empty_rows(self.dense(q_len, kv_len, device=device))
        return block_mask_of(cells if self.batch_size is not None else cells[None])

    def agrees_with(self, other: Mask, q_len: int, kv_len: int | None = None) -> bool:
        """Whether both masks allow the same cells at these lengths (a batched mask agrees if every row does)."""
        if not isinstance(other, Mask):
            raise MaskError(f"agrees_with compares two masks, and got {type(other).__name__}: use masks.from_dense")
        mine, theirs = self.dense(q_len, kv_len), other.dense(q_len, kv_len)
        if mine.ndim == theirs.ndim == 3 and mine.shape[0] != theirs.shape[0]:
            raise MaskError(f"{self} is for a batch of {mine.shape[0]} and {other} for one of {theirs.shape[0]}")
        return bool((mine == theirs).all())

    def ascii(self, tokens: Sequence[str] | int, row: int = 0) -> str:
        """The mask as text, one line per query, one column per key; `row` picks the row of a batched mask."""
        labels = [str(i) for i in range(tokens)] if isinstance(tokens, int) else [str(t) for t in tokens]
        cells = self.dense(len(labels))
        cells = cells[row] if cells.ndim == 3 else cells
        left = max(len(label) for label in labels)
        widths = [max(3, len(label)) for label in labels]
        lines = [" " * left + "  " + "  ".join(label.center(w) for label, w in zip(labels, widths, strict=True))]
        for label, allowed in zip(labels, cells.tolist(), strict=True):
            marks = "  ".join(("■" if a else "·").center(w) for a, w in zip(allowed, widths, strict=True))
            lines.append(f"{label.rjust(left)}  {marks}")
        return "\n".join(line.rstrip() for line in lines)


def self_for_empty_rows(cells: Bool[Tensor, "*batch query key"]) -> Bool[Tensor, "*batch query key"]:
    """The rule for a query that may attend to nothing: it attends to itself alone, so that its softmax is defined."""
    q_len, kv_len = cells.shape[-2:]
    itself = torch.eye(kv_len, dtype=torch.bool, device=cells.device)[kv_len - q_len :]  # (q_len, kv_len)
    return cells | (itself & ~cells.any(-1, keepdim=True))


def additive_of(cells: Bool[Tensor, "*batch query key"], dtype: torch.dtype) -> Float[Tensor, "*batch query key"]:
    """These cells as numbers to add to attention scores: 0 = may attend, the dtype's most negative number = may not."""
    return torch.zeros(cells.shape, dtype=dtype, device=cells.device).masked_fill(~cells, torch.finfo(dtype).min)


def block_mask_of(cells: Bool[Tensor, "rows query key"]) -> BlockMask:
    """These cells for `torch.nn.attention.flex_attention`, broadcast over heads, and over the batch if rows is 1.

    The kernel looks the cells up instead of running the mask's predicate, because it cannot compile a predicate that
    moves a table of lengths or segments to the GPU.
    """
    from torch.nn.attention.flex_attention import create_block_mask

    rows, q_len, kv_len = cells.shape

    @no_type_check  # FlexAttention counts its parameters
    def mask_mod(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return cells[batch if rows > 1 else torch.zeros_like(batch), query, key]

    return create_block_mask(mask_mod, B=rows, H=None, Q_LEN=q_len, KV_LEN=kv_len, device=cells.device)


def causal() -> Mask:
    """Every token attends to itself and what came before it: the mask of a decoder."""
    return Mask("causal()", "itself and everything before it", lambda b, q, k, n: k <= q, ("causal",))


def bidirectional() -> Mask:
    """Every token attends to every token: the mask of an encoder."""
    return Mask("bidirectional()", "every token", lambda b, q, k, n: (q >= 0) & (k >= 0), ("bidirectional",))


def sliding_window(w: int, causal: bool = True) -> Mask:
    """A window of `w` tokens. Causal: itself and the `w - 1` before it. Otherwise also the `w - 1` after it.

    `w` counts as Mistral's and Gemma's `sliding_window` does, so the token itself is one of the `w`.
    """
    w = _whole_number(w, "window", least=1)
    where = "before it" if causal else "on either side"
    meaning = f"itself and the {_tokens(w - 1)} {where}" if w > 1 else "itself alone"

    @no_type_check
    def allowed(b: Tensor, q: Tensor, k: Tensor, n: int) -> Tensor:
        return (q - k < w) & ((k <= q) if causal else (k - q < w))

    name = f"sliding_window({w})" if causal else f"sliding_window({w}, causal=False)"
    return Mask(name, meaning, allowed, ("sliding_window", w, bool(causal)))


def prefix(n: int | Sequence[int]) -> Mask:
    """Prefix-LM (Raffel et al. 2020, T5): every query may attend to the first `n` keys, the rest is causal.

    A list gives each row of a batch its own length; `dense` is then (batch, q, kv).
    """
    own = "itself and everything before it"
    meanings = (f"the first {{tokens}}, {own}", f"the prefix of its row, {own}")
    return _by_length("prefix", n, meanings, lambda q, k, length: (k <= q) | (k < length))


def hybrid(n: int | Sequence[int]) -> Mask:
    """Queries before `n` are causal; queries from `n` on may attend to every key.

    A list gives each row of a batch its own length; `dense` is then (batch, q, kv).
    """
    own = "itself and everything before it"
    meanings = (
        f"{own}; a token from position {{n}} on may attend to every token",
        f"{own}; a token after the causal part of its row may attend to every token",
    )
    return _by_length("hybrid", n, meanings, lambda q, k, length: (k <= q) | ((q >= length) & (k >= 0)))


def segments(ids: Sequence[int], inside: str = "causal", fuse_from: int | None = None) -> Mask:
    """Segments that do not attend to each other; positions from `fuse_from` on attend to everything before them.

    Args:
        ids: segment number of each position.
        inside: "causal" or "bidirectional" within a segment.
        fuse_from: first position that attends to itself and everything before it, whatever the segment. Those positions
            need no id, so the mask then goes on past `len(ids)` (generated tokens). None: no such position.
    """
    numbers = _whole_numbers(ids, "segment id")
    if inside not in ("causal", "bidirectional"):
        raise MaskError(f"inside a segment attention is 'causal' or 'bidirectional', not {inside!r}")
    if fuse_from is not None:
        fuse_from = _whole_number(fuse_from, "fuse_from", least=0)
        if fuse_from > len(numbers):
            raise MaskError(f"fuse_from={fuse_from}, but only the first {len(numbers)} positions have a segment id")
    table, last = torch.tensor(numbers), len(numbers) - 1

    @no_type_check
    def allowed(b: Tensor, q: Tensor, k: Tensor, n: int) -> Tensor:
        segment = table.to(q.device)
        same = (segment[q.clamp(max=last)] == segment[k.clamp(max=last)]) & (q <= last) & (k <= last)
        within = same & (k <= q) if inside == "causal" else same
        if fuse_from is None:
            return within
        return torch.where(q >= fuse_from, k <= q, within & (k < fuse_from))

    within = "its own segment" if inside == "bidirectional" else "itself and what came before it in its own segment"
    reader = f"; a token from position {fuse_from} on may attend to itself and all before it"
    fused = "" if fuse_from is None else reader
    arguments = [str(list(numbers))]
    arguments += [f"inside={inside!r}"] if inside != "causal" else []
    arguments += [f"fuse_from={fuse_from}"] if fuse_from is not None else []
    return Mask(
        f"segments({', '.join(arguments)})",
        within + fused,
        allowed,
        ("segments", numbers, inside, fuse_from),
        limit=len(numbers) if fuse_from is None else None,
    )


def padding(lengths: Sequence[int], side: str = "right") -> Mask:
    """No query attends to a padded **key**; `lengths[b]` is the number of real tokens in row b. Batched `dense`.

    Queries are never masked: a padded query attends to the real keys, and its output is ignored. With `side="left"` the
    real tokens are the last ones, so while decoding pass the lengths plus the number of generated tokens.
    """
    counts = _whole_numbers(lengths, "length", least=0)
    if side not in ("right", "left"):
        raise MaskError(f"padding is on the 'right' or the 'left' side, not {side!r}")
    table = torch.tensor(counts)

    @no_type_check
    def allowed(b: Tensor, q: Tensor, k: Tensor, n: int) -> Tensor:
        length = table.to(k.device)[b]
        return ((k < length) if side == "right" else (k >= n - length)) & (q >= 0)

    return Mask(
        f"padding({list(counts)})" if side == "right" else f"padding({list(counts)}, side='left')",
        f"real tokens (the padding is on the {side})",
        allowed,
        ("padding", counts, side),
        batch_size=len(counts),
        needs=max(counts),
    )


def from_dense(array) -> Mask:
    """A painted or measured mask: `array` is bool (or 0/1), (n, n) or (batch, n, n), True = may attend.

    It is defined for up to n positions; a shorter sequence takes the upper left corner.

    Raises:
        MaskError: not square, empty, or a float array (an additive mask has 0 where attention is allowed: pass
            `array == 0`).
    """
    try:
        cells = torch.as_tensor(array).detach().cpu()
    except (TypeError, ValueError, RuntimeError):
        raise MaskError(f"from_dense takes a bool array of shape (n, n) or (batch, n, n), not {array!r}") from None
    if cells.ndim not in (2, 3) or cells.shape[-1] != cells.shape[-2] or cells.numel() == 0:
        raise MaskError(f"from_dense takes an (n, n) or (batch, n, n) array, not one of shape {tuple(cells.shape)}")
    if cells.dtype.is_floating_point or not bool(((cells == 0) | (cells == 1)).all()):
        raise MaskError("from_dense takes a bool array, or integers 0 and 1; of an additive mask pass `array == 0`")
    cells = cells.bool().clone()
    n, batch_size = cells.shape[-1], cells.shape[0] if cells.ndim == 3 else None
    stacked = cells if cells.ndim == 3 else cells[None]

    @no_type_check
    def allowed(b: Tensor, q: Tensor, k: Tensor, n: int) -> Tensor:
        return stacked.to(q.device)[b if batch_size is not None else torch.zeros_like(b), q, k]

    rows = "" if batch_size is None else f"{batch_size} x "
    return Mask(
        f"from_dense({rows}{n} x {n}, {int(cells.sum())} cells)",
        "the cells that were painted or measured",
        allowed,
        ("from_dense", tuple(cells.shape), cells.numpy().tobytes()),
        batch_size=batch_size,
        limit=n,
    )


def recognise(cells: Bool[Tensor, "n n"]) -> Mask | None:
    """The simplest named mask with exactly these cells, or None. The way back from a measured mask to an expression."""
    n, cells = cells.shape[-1], cells.cpu()
    first, last = max(1, int(cells[0].sum())), max(1, int(cells[-1].sum()))  # keys that these queries attend to
    candidates = [bidirectional(), causal(), sliding_window(last), sliding_window(first, causal=False)]
    candidates += [prefix(first), hybrid(n - int(cells.all(-1).sum()))]
    return next((mask for mask in candidates if torch.equal(mask.dense(n), cells)), None)


def _by_length(kind: str, value: int | Sequence[int], meanings: tuple[str, str], allowed: Callable) -> Mask:
    """A mask whose `allowed(query, key, length)` depends on one length, the same for every row or one per row.

    meanings: for one length, as a template of `n` and `tokens`, and for one per row.
    """
    if not hasattr(value, "__len__") or getattr(value, "ndim", 1) == 0:
        length = _whole_number(value, f"{kind} length", least=0)
        meaning = meanings[0].format(n=length, tokens=_tokens(length))
        return Mask(f"{kind}({length})", meaning, lambda b, q, k, n: allowed(q, k, length), (kind, length))
    lengths = _whole_numbers(value, f"{kind} length", least=0)
    table = torch.tensor(lengths)

    @no_type_check
    def predicate(b: Tensor, q: Tensor, k: Tensor, n: int) -> Tensor:
        return allowed(q, k, table.to(k.device)[b])

    return Mask(f"{kind}({list(lengths)})", meanings[1], predicate, (kind, lengths), batch_size=len(lengths))


def _combine(sign: str, a: Mask, b: Mask) -> Mask:
    if not isinstance(b, Mask):
        raise MaskError(f"{sign} combines two masks, and got {type(b).__name__}: make it one with masks.from_dense")
    word, both = OPERATORS[sign]
    sizes = {m.batch_size for m in (a, b) if m.batch_size is not None}
    if len(sizes) > 1:
        raise MaskError(f"{a} and {b} are for batches of different size: {a.batch_size} and {b.batch_size}")
    limits = [m.limit for m in (a, b) if m.limit is not None]
    return Mask(
        name=f"{_bracketed(a)} {sign} {_bracketed(b)}",
        meaning=f"({a.meaning}) {word} ({b.meaning})",
        predicate=lambda i, q, k, n: both(a.predicate(i, q, k, n), b.predicate(i, q, k, n)),
        identity=(sign, a.identity, b.identity),
        batch_size=next(iter(sizes), None),
        limit=min(limits) if limits else None,
        needs=max(a.needs, b.needs),
    )


def _from_identity(identity: tuple) -> Mask:
    kind, *rest = identity
    if kind in OPERATORS:
        return _combine(kind, *map(_from_identity, rest))
    if kind == "~":
        return ~_from_identity(rest[0])
    if kind == "from_dense":
        shape, cells = rest
        return from_dense(torch.frombuffer(bytearray(cells), dtype=torch.bool).view(shape))
    return globals()[kind](*rest)


def _bracketed(mask: Mask) -> str:
    return f"({mask.name})" if mask.identity[0] in ("&", "|") else mask.name


def _tokens(n: int) -> str:
    return "1 token" if n == 1 else f"{n} tokens"


def _whole_number(value, what: str, least: int | None = None) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool) or (least is not None and number < least):
        raise MaskError(
            f"{what} must be a whole number{'' if least is None else f' of at least {least}'}, not {value!r}"
        )
    return number


def _whole_numbers(values, what: str, least: int | None = None) -> tuple[int, ...]:
    values = values.tolist() if hasattr(values, "tolist") else values
    if isinstance(values, (str, bytes)) or not hasattr(values, "__len__") or not len(values):
        raise MaskError(f"expected a list of whole numbers ({what}s), not {values!r}")
    return tuple(_whole_number(value, what, least) for value in values)
