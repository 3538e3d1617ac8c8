"""The ways in which a recipe gets at a model: it rebuilds it, replaces a forward, or hands it a mask of its own.

Everything here is installed on the *inner* decoder stack (`model.model`, `model.transformer`) or below, so that a call
through the language-model head and a call of the bare stack meet the same recipe. New forwards are bound methods, and
hooks take the module as an argument: a `copy.deepcopy` of the model keeps the recipe and does not reach back into the
original.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from labkit.decoder.anatomy import find_decoder
from labkit.errors import ConversionError

TEXT_FAMILIES = ("gpt2", "gemma", "gemma2", "gemma3_text", "llama")
ROTARY_FAMILIES = ("gemma", "gemma2", "gemma3_text", "llama")
WINDOWED_FAMILIES = ("gemma2", "gemma3_text")

Predicate = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # (row, head, q, kv) -> may attend


def rebind_forward(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Replace `module.forward` by `forward(module, ...)`, for this one instance."""
    module.forward = MethodType(forward, module)


def rebuild_in_place(model: nn.Module, config: Any) -> None:
    """Turn `model` into what its constructor would have made of `config`, with the weights kept.

    For recipes that set something *before* the model is built: the constructor runs for real, nothing is imitated.
    Hooks that were registered on `model` are gone afterwards, as they would be after a reload.
    """
    config._attn_implementation = model.config._attn_implementation
    fresh = type(model)(config).to(device=model.device, dtype=model.dtype)
    fresh.load_state_dict(model.state_dict())
    fresh.train(model.training)
    model.__dict__.clear()
    model.__dict__.update(fresh.__dict__)


def config_with(model: nn.Module, **changes: Any) -> Any:
    """A new config of the same class, made by its constructor from the old one's fields and `changes`."""
    return type(model.config).from_dict({**copy.deepcopy(model.config.to_dict()), **changes})


# --- handing over another mask ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Batch:
    """What a recipe that builds its own mask can see of the call."""

    real_keys: Tensor  # (batch, kv_len) bool, False = padding
    query_length: int
    dtype: torch.dtype
    backend: str

    @property
    def shape_4d(self) -> tuple[int, int, int, int]:
        """(batch, 1, q_len, kv_len)"""
        batch_size, kv_length = self.real_keys.shape
        return batch_size, 1, self.query_length, kv_length

    def spread(self) -> Tensor:
        """The padding as a bool mask (batch, 1, q_len, kv_len), True = a real key."""
        return self.real_keys[:, None, None, :].expand(self.shape_4d)

    def mask(self, predicate: Predicate) -> Any:
        """`predicate(row, head, q, kv)` in the form the backend wants; q counts from the first key, cached or not."""
        offset = self.real_keys.shape[1] - self.query_length
        from_the_start = lambda row, head, q, kv: predicate(row, head, q + offset, kv)  # noqa: E731 - see `mask_for`
        like = torch.empty(0, dtype=self.dtype, device=self.real_keys.device)
        return mask_for(self.backend, from_the_start, self.shape_4d, like)


def replace_mask(model: nn.Module, make_mask: Callable[[Batch], Any]) -> None:
    """From now on the stack receives `make_mask(batch)` instead of the 2-D attention mask the caller passed.

    A mask that is not 2-D is left alone: whoever passes one has taken the matter in hand.
    """

    def swap(stack: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        given = kwargs.get("attention_mask")
        if given is not None and not (isinstance(given, Tensor) and given.ndim == 2):
            return None
        mask = make_mask(_batch_seen(stack, args, kwargs))
        if isinstance(mask, Tensor) and mask.ndim == 4:
            _refuse_to_crash(stack, mask)
        return args, {**kwargs, "attention_mask": mask}

    find_decoder(model).stack.register_forward_pre_hook(swap, with_kwargs=True)


def _batch_seen(stack: nn.Module, args: tuple, kwargs: dict) -> Batch:
    tokens = kwargs.get("inputs_embeds")
    if tokens is None:
        tokens = args[0] if args else kwargs["input_ids"]
    batch_size, query_length = tokens.shape[:2]
    mask = kwargs.get("attention_mask")
    if mask is None:
        past = kwargs.get("past_key_values")
        kv_length = query_length + (past.get_seq_length() if past is not None else 0)
        mask = torch.ones(batch_size, kv_length, device=tokens.device)
    backend = stack.config._attn_implementation or "eager"
    return Batch(mask.bool(), query_length, next(stack.parameters()).dtype, backend)


def _refuse_to_crash(stack: nn.Module, mask: Tensor) -> None:
    """FlexAttention on a CPU dies of a 4-D tensor mask (segmentation fault in the compiled kernel): stop before it."""
    if stack.config._attn_implementation == "flex_attention" and mask.device.type == "cpu":
        raise ConversionError(
            "this exhibit hands a 4-D tensor to FlexAttention, which on a CPU crashes the whole process; "
            "show it under eager or sdpa"
        )


# --- reading and writing the mask that an attention module is handed -------------------------------------------------


def allowed(mask: Any, query_length: int, kv_length: int) -> Tensor | None:
    """The mask an attention module was handed, as bool (batch, 1, q_len, kv_len), True = may attend. None: None."""
    if mask is None:
        return None
    if isinstance(mask, Tensor):
        mask = mask[..., :kv_length]
        return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    from torch.nn.attention.flex_attention import create_mask

    return create_mask(mask.mask_mod, mask.shape[0], 1, query_length, kv_length, device=str(mask.kv_num_blocks.device))


def additive(may_attend: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where attention is allowed, the most negative number elsewhere: what eager and SDPA add to the scores."""
    return torch.zeros(may_attend.shape, dtype=dtype, device=may_attend.device).masked_fill(
        ~may_attend, torch.finfo(dtype).min
    )


def mask_for(backend: str, predicate: Predicate, shape: tuple[int, int, int, int], like: Tensor) -> Any:
    """The predicate as a mask of `shape`: a BlockMask for FlexAttention, else additive, in the dtype of `like`.

    FlexAttention compiles the predicate and counts its arguments: a lambda survives the shape checks that the tests
    wrap around every annotated function, a `def` does not.
    """
    batch_size, _, q_length, kv_length = shape
    device = like.device
    if backend == "flex_attention":
        from torch.nn.attention.flex_attention import create_block_mask

        return create_block_mask(predicate, batch_size, None, q_length, kv_length, device=str(device))
    rows = torch.arange(batch_size, device=device)[:, None, None, None]
    q = torch.arange(q_length, device=device)[None, None, :, None]
    kv = torch.arange(kv_length, device=device)[None, None, None, :]
    return additive(predicate(rows, torch.zeros_like(rows), q, kv).expand(shape), like.dtype)


def both_directions(attn: nn.Module, hidden: Tensor, mask: Any) -> Any:
    """The causal mask of one layer and its mirror image, pads still excluded: what a right recipe would give it.

    Derived from the causal mask alone, whatever form the backend gives it. hidden: (batch, seq, dim); no cache.
    """
    batch_size, length = hidden.shape[:2]
    causal = allowed(mask, length, length)
    if causal is None:
        causal = torch.ones(batch_size, 1, length, length, dtype=torch.bool, device=hidden.device).tril()
    seen_by_any = causal.any(dim=-2)[:, 0].expand(batch_size, -1)  # (batch, seq): a pad is seen by nobody
    if isinstance(mask, Tensor) or mask is None:
        both = (causal | causal.transpose(-1, -2)) & seen_by_any[:, None, None, :]
        return additive(both, hidden.dtype)

    may_attend = mask.mask_mod
    either_way = lambda row, head, q, kv: (  # noqa: E731 - see `mask_for`
        (may_attend(row, head, q, kv) | may_attend(row, head, kv, q)) & seen_by_any[row, kv]
    )
    return mask_for("flex_attention", either_way, (batch_size, 1, length, length), hidden)
