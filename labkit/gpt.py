"""GPT-2 from scratch, to be read from top to bottom, with the weights of transformers' GPT-2.

    g = GPT.from_transformers(model)                     # any GPT2LMHeadModel
    logits = g(ids, mask=masks.causal())                 # (batch, seq, vocab)
    logits = g(ids, mask=masks.bidirectional())          # the same weights, another mask

The mask is an argument, so the same code computes causal, bidirectional, prefix and hybrid attention. The layers have
OpenAI's names (wte, wpe, c_attn, ...). Source: Radford et al. 2019, "Language Models are Unsupervised Multitask
Learners".
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import DynamicCache

from labkit import masks
from labkit.errors import ConversionError, MaskError, ModelError
from labkit.masks import Mask, self_for_empty_rows

CAUSAL = masks.causal()
GELU = {"gelu_new": "tanh", "gelu": "none"}  # transformers' names, torch's
SUPPORTED = {  # values of the fields of transformers' config that change the computation
    "model_type": ("gpt2",), "activation_function": tuple(GELU), "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,), "reorder_and_upcast_attn": (False,), "add_cross_attention": (False,),
    "tie_word_embeddings": (True,),
}  # fmt: skip


@dataclass(frozen=True)
class GPTConfig:
    """The sizes of a GPT-2; the defaults are those of the smallest one, 124 M parameters."""

    vocab_size: int = 50257
    context: int = 1024
    width: int = 768
    layers: int = 12
    heads: int = 12
    inner: int | None = None  # width of the MLP's hidden layer; None: four times `width`
    dropout: float = 0.0
    embedding_dropout: float | None = None  # None: as `dropout`
    attention_dropout: float = 0.0
    epsilon: float = 1e-5
    activation: str = "gelu_new"  # GPT-2's approximation by a tanh; "gelu": the exact one


# -- attention ---------------------------------------------------------------------------------------------------------


def attention_weights(
    query: Float[Tensor, "batch heads q width"], key: Float[Tensor, "batch heads k width"], may_attend: Tensor | None
) -> Float[Tensor, "batch heads q k"]:
    """softmax(QK^T / sqrt(width)), -inf where a query may not attend. `may_attend`: bool (q, k) or (batch, 1, q, k)."""
    scores = query @ key.transpose(-2, -1) / math.sqrt(query.size(-1))  # (batch, heads, q, k)
    if may_attend is not None:
        scores = scores.masked_fill(~may_attend, -torch.inf)
    return scores.softmax(dim=-1)


def naive_attention(query, key, value, may_attend, dropout: float) -> Float[Tensor, "batch heads q width"]:
    """Attention as in the formula, with all scores in memory."""
    weights = F.dropout(attention_weights(query, key, may_attend), dropout)  # (batch, heads, q, k)
    return weights @ value


def sdpa_attention(query, key, value, may_attend, dropout: float) -> Float[Tensor, "batch heads q width"]:
    """The same in torch's fused kernel, which never holds all scores; `may_attend="causal"` is its fastest case."""
    if isinstance(may_attend, str):
        return F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=may_attend, dropout_p=dropout)


class Attention(nn.Module):
    """Multi-head self-attention."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.c_attn = nn.Linear(config.width, 3 * config.width)
        self.c_proj = nn.Linear(config.width, config.width)
        self.heads, self.attention_dropout = config.heads, config.attention_dropout
        self.dropout = nn.Dropout(config.dropout)

    def project(self, x: Float[Tensor, "batch seq width"]) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value of every head, each (batch, heads, seq, width / heads)."""
        batch, seq, width = x.shape
        query, key, value = self.c_attn(x).split(width, dim=2)  # 3 x (batch, seq, width)
        per_head = (batch, seq, self.heads, width // self.heads)
        return tuple(t.view(per_head).transpose(1, 2) for t in (query, key, value))

    def forward(
        self, x: Float[Tensor, "batch seq width"], may_attend, attend, cache: DynamicCache | None, layer: int
    ) -> Tensor:
        batch, seq, width = x.shape
        query, key, value = self.project(x)  # 3 x (batch, heads, seq, width / heads)
        if cache is not None:
            key, value = cache.update(key, value, layer)  # (batch, heads, past + seq, width / heads)
        mixed = attend(query, key, value, may_attend, self.attention_dropout if self.training else 0.0)
        mixed = mixed.transpose(1, 2).reshape(batch, seq, width)  # heads side by side again
        return self.dropout(self.c_proj(mixed))


# -- the block ---------------------------------------------------------------------------------------------------------


class MLP(nn.Module):
    """Applied to each position separately: widen, GELU, narrow."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        inner = config.inner or 4 * config.width
        self.c_fc = nn.Linear(config.width, inner)
        self.c_proj = nn.Linear(inner, config.width)
        self.gelu, self.dropout = nn.GELU(GELU[config.activation]), nn.Dropout(config.dropout)

    def forward(self, x: Float[Tensor, "batch seq width"]) -> Float[Tensor, "batch seq width"]:
        return self.dropout(self.c_proj(self.gelu(self.c_fc(x))))


class Block(nn.Module):
    """Attention moves information between positions, the MLP works on each; both add to the residual stream."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.width, eps=config.epsilon)
        self.attn = Attention(config)
        self.ln_2 = nn.LayerNorm(config.width, eps=config.epsilon)
        self.mlp = MLP(config)

    def forward(self, x: Float[Tensor, "batch seq width"], *attention) -> Float[Tensor, "batch seq width"]:
        x = x + self.attn(self.ln_1(x), *attention)
        return x + self.mlp(self.ln_2(x))


# -- the model ---------------------------------------------------------------------------------------------------------


class GPT(nn.Module):
    """The language model."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.width)  # the tokens; transposed, also the output head
        self.wpe = nn.Embedding(config.context, config.width)  # the positions
        self.drop = nn.Dropout(config.dropout if config.embedding_dropout is None else config.embedding_dropout)
        self.h = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.ln_f = nn.LayerNorm(config.width, eps=config.epsilon)
        self._initialise()

    def forward(
        self, ids: Int[Tensor, "batch seq"], mask: Mask = CAUSAL, cache: DynamicCache | None = None
    ) -> Float[Tensor, "batch seq vocab"]:
        """Logits at every position. With a `cache`, which is filled in place, the `ids` continue the earlier ones.

        Raises:
            MaskError: more positions than the model has, or a mask that is not defined for this batch.
        """
        return self.hidden(ids, mask, cache) @ self.wte.weight.T

    def hidden(self, ids: Int[Tensor, "batch seq"], mask: Mask = CAUSAL, cache: DynamicCache | None = None) -> Tensor:
        """The last hidden states (batch, seq, width), from which the head computes the logits."""
        past = cache.get_seq_length() if cache is not None else 0
        may_attend = self._may_attend(mask, ids, past)
        x = self._embed(ids, past)
        for layer, block in enumerate(self.h):
            x = block(x, may_attend, sdpa_attention, cache, layer)
        return self.ln_f(x)

    def loss(
        self, ids: Int[Tensor, "batch seq"], targets: Int[Tensor, "batch seq"], mask: Mask = CAUSAL
    ) -> Float[Tensor, ""]:
        """Mean cross entropy in nats: the logits at position i predict `targets[i]`; -100 is not counted."""
        return F.cross_entropy(self(ids, mask).flatten(0, 1).float(), targets.flatten())

    @torch.no_grad()
    def attentions(self, ids: Int[Tensor, "batch seq"], mask: Mask = CAUSAL) -> Float[Tensor, "layer batch head q k"]:
        """The attention weights of every layer and head."""
        may_attend = self._may_attend(mask, ids, 0, as_cells=True)
        x, weights = self._embed(ids, 0), []
        for layer, block in enumerate(self.h):
            query, key, _ = block.attn.project(block.ln_1(x))
            weights.append(attention_weights(query, key, may_attend))
            x = block(x, may_attend, naive_attention, None, layer)
        return torch.stack(weights)

    @torch.no_grad()
    def generate(
        self, ids: Int[Tensor, "batch seq"], max_new_tokens: int, *, mask: Mask = CAUSAL, use_cache: bool = True
    ) -> Int[Tensor, "batch longer"]:
        """`ids` and `max_new_tokens` more, the most likely token each time.

        With the cache each position is computed once; without it, all positions are computed again for each new token.

        Raises:
            ConversionError: with the cache, a mask under which a new token changes what earlier positions attend to:
                their cached states would be wrong. MaskError: longer than the context.
        """
        if use_cache:
            _require_settled_past(mask, ids.size(1), ids.size(1) + max_new_tokens - 1)
        cache, new = (DynamicCache() if use_cache else None), ids
        for _ in range(max_new_tokens):
            token = self(new, mask, cache)[:, -1].argmax(-1, keepdim=True)  # (batch, 1)
            ids = torch.cat([ids, token], dim=1)
            new = token if use_cache else ids
        return ids

    def _embed(self, ids: Tensor, past: int) -> Float[Tensor, "batch seq width"]:
        total = past + ids.size(1)
        if total > self.config.context:
            raise MaskError(f"{total} tokens, and this model has positions for {self.config.context}")
        return self.drop(self.wte(ids) + self.wpe.weight[past:total])  # (batch, seq, width) + (seq, width)

    def _may_attend(self, mask: Mask, ids: Tensor, past: int, as_cells: bool = False) -> Tensor | str | None:
        """The mask for the attention function: bool cells, None if all are open, "causal" as a shortcut."""
        if mask == CAUSAL and not past and not as_cells:
            return "causal"
        if mask.batch_size not in (None, len(ids)):
            raise MaskError(f"{mask} is for a batch of {mask.batch_size}, and the batch has {len(ids)} rows")
        cells = self_for_empty_rows(mask.dense(ids.size(1), past + ids.size(1), device=ids.device))
        cells = cells[:, None] if cells.ndim == 3 else cells  # (batch, 1, q, k) or (q, k)
        return None if not as_cells and bool(cells.all()) else cells

    def _initialise(self) -> None:
        """As in GPT-2: normal(0, 0.02), and smaller where a layer adds to the residual stream."""
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                layers_that_add = 2 * self.config.layers if name.endswith("c_proj.weight") else 1
                nn.init.normal_(parameter, std=0.02 / math.sqrt(layers_that_add))
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    # -- weights from transformers -------------------------------------------------------------------------------------

    @classmethod
    def from_transformers(cls, model: nn.Module) -> GPT:
        """A GPT with a copy of the weights of transformers' `GPT2LMHeadModel`; same mode, dtype and device.

        Raises:
            ModelError: not a GPT-2, or one with an option that GPT-2 itself does not use.
        """
        config, name = model.config, type(model).__name__
        for field, supported in SUPPORTED.items():
            if (value := getattr(config, field, None)) not in supported:
                raise ModelError(f"GPT reads the weights of a GPT-2; this {name} has {field}={value!r}")
        if not hasattr(model, "lm_head"):
            raise ModelError(f"GPT reads a GPT2LMHeadModel, not a {name} without its head")
        g = cls(
            GPTConfig(
                vocab_size=config.vocab_size, context=config.n_positions, width=config.n_embd, layers=config.n_layer,
                heads=config.n_head, inner=config.n_inner, dropout=config.resid_pdrop,
                embedding_dropout=config.embd_pdrop, attention_dropout=config.attn_pdrop,
                epsilon=config.layer_norm_epsilon, activation=config.activation_function,
            )
        )  # fmt: skip
        weights = model.transformer.state_dict()
        g.load_state_dict({name: _turned(name, weight) for name, weight in weights.items()})
        return g.to(device=model.device, dtype=model.dtype).train(model.training)


def _turned(name: str, weight: Tensor) -> Tensor:
    """transformers keeps GPT-2's matrices as (in, out), nn.Linear as (out, in)."""
    return weight.T if name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")) else weight


def _require_settled_past(mask: Mask, prompt: int, total: int) -> None:
    """Raise ConversionError if a later token changes what an earlier position, whose state is cached, attends to."""
    if total <= prompt:
        return
    cells = mask.dense(total)  # (total, total), or one per row
    later = torch.ones(total, total, dtype=torch.bool).triu(1)
    later[:prompt, :prompt] = False  # the prompt is read at once, so it may attend to all of itself
    if bool((cells & later).any()) or not torch.equal(cells[..., :prompt, :prompt], mask.dense(prompt)):
        raise ConversionError(
            f"under {mask} a new token changes what earlier positions attend to: their cached states would be wrong. "
            "Pass use_cache=False to recompute them at every step, or masks.prefix(n) to unmask only a prompt"
        )
