"""The ways in which a recipe changes a model: it sets a field, rebuilds the model, replaces a forward or a mask.

Everything is installed on the *inner* decoder stack (`model.model`, `model.transformer`) or below, so it has the same
effect whether the model is called through its language-model head or as a bare stack. New forwards are bound methods,
and hooks take the module as an argument: a `copy.deepcopy` of the model keeps the recipe and is independent of the
original.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, create_mask

from labkit.decoder.anatomy import CACHE, find_decoder
from labkit.errors import ConversionError

Predicate = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # (row, head, q, kv) -> may attend
Install = Callable[[nn.Module], None]


def set_in_config(**fields: Any) -> Install:
    """A recipe that sets these fields in the config of a finished model's decoder stack."""

    def install(model: nn.Module) -> None:
        for name, value in fields.items():
            setattr(find_decoder(model).config, name, value)

    return install


def build_with(**fields: Any) -> Install:
    """A recipe that builds the model with these fields in its config."""
    return lambda model: rebuild_in_place(
        model, type(model.config).from_dict({**copy.deepcopy(model.config.to_dict()), **fields})
    )


def rebuild_in_place(model: nn.Module, config: Any) -> None:
    """Turn `model` into what its constructor would have made of `config`, with the weights kept.

    Hooks that were registered on `model` are gone afterwards, as they would be after a reload.
    """
    config._attn_implementation = model.config._attn_implementation
    fresh = type(model)(config).to(device=model.device, dtype=model.dtype)
    fresh.load_state_dict(model.state_dict())
    fresh.train(model.training)
    model.__dict__.clear()
    model.__dict__.update(fresh.__dict__)


def rebind_forward(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Replace `module.forward` by `forward(module, ...)`, for this one instance."""
    module.forward = MethodType(forward, module)


# --- passing another mask --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Batch:
    """What a recipe that builds its own mask knows of the call."""

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
        """`predicate(row, head, q, kv)` in the form that the backend takes; q counts from the first key, cached or not.

        FlexAttention compiles the predicate and counts its arguments. A lambda keeps its own under the type checks that
        the tests add to every function with annotated shapes; a `def` does not.
        """
        offset = self.real_keys.shape[1] - self.query_length
        from_the_start = lambda row, head, q, kv: predicate(row, head, q + offset, kv)  # noqa: E731
        return mask_for(self.backend, from_the_start, self.shape_4d, self.dtype, self.real_keys.device)


def replace_mask(make_mask: Callable[[nn.Module, Batch], Any]) -> Install:
    """A recipe that gives the stack `make_mask(stack, batch)` instead of the 2-D attention mask of the caller.

    A caller's mask that is not 2-D is left alone.
    """

    def swap(stack: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        given = kwargs.get("attention_mask")
        if given is not None and not (isinstance(given, Tensor) and given.ndim == 2):
            return None
        tokens = kwargs.get("inputs_embeds")
        if tokens is None:
            tokens = args[0] if args else kwargs["input_ids"]
        batch_size, query_length = tokens.shape[:2]
        if given is None:
            past = kwargs.get(CACHE)
            kv_length = query_length + (past.get_seq_length() if past is not None else 0)
            given = torch.ones(batch_size, kv_length, device=tokens.device)
        backend = stack.config._attn_implementation or "eager"
        mask = make_mask(stack, Batch(given.bool(), query_length, next(stack.parameters()).dtype, backend))
        if isinstance(mask, Tensor) and mask.ndim == 4 and backend == "flex_attention" and mask.device.type == "cpu":
            raise ConversionError(  # instead of the segmentation fault in the compiled kernel
                "this exhibit hands a 4-D tensor to FlexAttention, which on a CPU crashes the whole process; "
                "show it under eager or sdpa"
            )
        return args, {**kwargs, "attention_mask": mask}

    return lambda model: find_decoder(model).stack.register_forward_pre_hook(swap, with_kwargs=True)


# --- reading and writing the mask that an attention module receives --------------------------------------------------


def allowed(mask: Any, query_length: int, kv_length: int) -> Tensor | None:
    """The mask of an attention module as bool (batch, 1, q_len, kv_len), True = may attend; None if there is none."""
    if mask is None:
        return None
    if isinstance(mask, Tensor):
        mask = mask[..., :kv_length]
        return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    return create_mask(mask.mask_mod, mask.shape[0], 1, query_length, kv_length, device=str(mask.kv_num_blocks.device))


def additive(may_attend: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where attention is allowed, the most negative number elsewhere: what eager and SDPA add to the scores."""
    zeros = torch.zeros(may_attend.shape, dtype=dtype, device=may_attend.device)
    return zeros.masked_fill(~may_attend, torch.finfo(dtype).min)


def mask_for(backend: str, predicate: Predicate, shape: tuple[int, ...], dtype: torch.dtype, device: Any) -> Any:
    """The predicate as a mask of `shape` (batch, 1, q_len, kv_len): a BlockMask for FlexAttention, else additive."""
    batch_size, _, q_length, kv_length = shape
    if backend == "flex_attention":
        return create_block_mask(predicate, batch_size, None, q_length, kv_length, device=str(device))
    return additive(create_mask(predicate, batch_size, 1, q_length, kv_length, device=str(device)), dtype)


def both_directions(hidden: Tensor, mask: Any) -> Any:
    """The causal mask of one layer and its mirror image, without the pads: what a correct conversion gives this layer.

    hidden: (batch, seq, dim); no cache. The form of the mask is kept.
    """
    batch_size, length = hidden.shape[:2]
    causal = allowed(mask, length, length)
    if causal is None:
        causal = torch.ones(batch_size, 1, length, length, dtype=torch.bool, device=hidden.device).tril()
    real = causal.any(dim=-2)[:, 0].expand(batch_size, -1)  # (batch, seq): no query may attend to a pad
    if isinstance(mask, Tensor) or mask is None:
        return additive((causal | causal.transpose(-1, -2)) & real[:, None, None, :], hidden.dtype)
    may_attend = mask.mask_mod
    either_way = lambda row, head, q, kv: (  # noqa: E731 - see `Batch.mask`
        (may_attend(row, head, q, kv) | may_attend(row, head, kv, q)) & real[row, kv]
    )
    return mask_for("flex_attention", either_way, (batch_size, 1, length, length), hidden.dtype, hidden.device)
