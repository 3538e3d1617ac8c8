"""The ways in which a recipe changes a model: it sets a field, rebuilds the model, replaces a forward or a mask.

Everything is installed on the *inner* decoder stack (`model.model`, `model.transformer`) or below, so it has the same
effect whether the model is called through its language-model head or as a bare stack. New forwards are bound methods,
and hooks take the module as an argument: a `copy.deepcopy` of the model keeps the recipe and is independent of the
original.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_mask

from labkit.decoder.anatomy import CACHE, find_decoder
from labkit.errors import ConversionError
from labkit.masks import additive_of, block_mask_of

Install = Callable[[nn.Module], None]


def set_in_config(**fields: Any) -> Install:
    """A recipe that sets these fields in the config of a finished model's decoder stack."""

    def install(model: nn.Module) -> None:
        for name, value in fields.items():
            setattr(find_decoder(model).config, name, value)

    return install


def build_with(**fields: Any) -> Install:
    """A recipe that builds the model with these fields in its config."""
    return lambda model: rebuild_in_place(model, type(model.config).from_dict(model.config.to_dict() | fields))


def rebuild_in_place(model: nn.Module, config: Any) -> None:
    """Turn `model` into what its constructor makes of `config`, with the weights kept and hooks on `model` removed."""
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
    """A call of the model, for a recipe that builds its own mask."""

    real_keys: Tensor  # (batch, kv_len) bool, False = padding
    query_length: int
    dtype: torch.dtype
    backend: str

    @property
    def key(self) -> Tensor:
        """Positions of the keys, (kv_len,)."""
        return torch.arange(self.real_keys.shape[1], device=self.real_keys.device)

    @property
    def query(self) -> Tensor:
        """Positions of the queries, (q_len, 1): with a cache they are the last ones."""
        return self.key[-self.query_length :, None]

    def spread(self) -> Tensor:
        """The padding as a bool mask (batch, 1, q_len, kv_len), True = a real key."""
        return self.real_keys[:, None, None, :].expand(-1, 1, self.query_length, -1)

    def render(self, may_attend: Tensor) -> Any:
        """Cells, bool (batch or 1, 1, q_len, kv_len), as the mask that the backend takes."""
        cells = may_attend.expand_as(self.spread())
        return block_mask_of(cells[:, 0]) if self.backend == "flex_attention" else additive_of(cells, self.dtype)


def replace_mask(make_mask: Callable[[nn.Module, Batch], Any]) -> Install:
    """A recipe that gives the stack `make_mask(stack, batch)` instead of the 2-D attention mask of the caller."""

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


def both_directions(hidden: Tensor, mask: Any) -> Any:
    """The causal mask of one layer and its mirror image, without the pads: what a correct conversion gives this layer.

    hidden: (batch, seq, dim); no cache. The form of the mask is kept.
    """
    batch_size, length = hidden.shape[:2]
    causal = allowed(mask, length, length)
    if causal is None:
        causal = torch.ones(batch_size, 1, length, length, dtype=torch.bool, device=hidden.device).tril()
    real = causal.any(dim=-2, keepdim=True)  # (batch, 1, 1, seq): no query may attend to a pad
    either_way = (causal | causal.transpose(-1, -2)) & real
    if mask is None or isinstance(mask, Tensor):
        return additive_of(either_way, hidden.dtype)
    return block_mask_of(either_way[:, 0])
