"""Rewrites: attention written again by hand. The mask is right, and the computation around it is not.

`attention` computes what the library's own attention does, step by step. An exhibit replaces one of the steps. All of
them set `config.is_causal = False`, so the mask that they receive is bidirectional and contains the padding.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from labkit.decoder.anatomy import CACHE, find_decoder
from labkit.errors import ConversionError
from labkit.pitfalls.exhibit import ROTARY_FAMILIES, Pitfall
from labkit.pitfalls.interventions import additive, allowed, rebind_forward

# --- the steps of attention, done right ------------------------------------------------------------------------------


def project(attn: nn.Module, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(batch, seq, dim) -> query (batch, heads, seq, head_dim), key and value (batch, kv_heads, seq, head_dim)."""
    if hasattr(attn, "c_attn"):
        query, key, value = attn.c_attn(hidden).split(attn.split_size, dim=2)
    else:
        query, key, value = attn.q_proj(hidden), attn.k_proj(hidden), attn.v_proj(hidden)
    by_head = (*hidden.shape[:2], -1, attn.head_dim)
    return tuple(states.view(by_head).transpose(1, 2) for states in (query, key, value))


def normalise(attn: nn.Module, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Gemma 3 normalises queries and keys head by head; the others have no such step."""
    return (attn.q_norm(query), attn.k_norm(key)) if hasattr(attn, "q_norm") else (query, key)


def rotate(states: Tensor, position_embeddings: tuple[Tensor, Tensor] | None) -> Tensor:
    """The rotary embedding, in the half-split form; GPT-2 has none. states: (batch, heads, seq, head_dim)."""
    if position_embeddings is None:
        return states
    cos, sin = (table.unsqueeze(1) for table in position_embeddings)  # (batch, 1, seq, head_dim)
    left, right = states.chunk(2, dim=-1)
    return states * cos + torch.cat((-right, left), dim=-1) * sin


def share_heads(attn: nn.Module, states: Tensor) -> Tensor:
    """Grouped queries: (batch, kv_heads, seq, head_dim) -> (batch, heads, seq, head_dim), each KV head repeated."""
    return states.repeat_interleave(getattr(attn, "num_key_value_groups", 1), dim=1)


def scale(attn: nn.Module, scores: Tensor) -> Tensor:
    return scores * attn.scaling


def soften(attn: nn.Module, scores: Tensor) -> Tensor:
    """Gemma 2 bends large scores towards a cap; the others have no such step."""
    cap = getattr(attn, "attn_logit_softcapping", None)
    return scores if cap is None else torch.tanh(scores / cap) * cap


def hide(scores: Tensor, mask: Any) -> Tensor:
    """Add the mask, in whatever form it comes, to the scores (batch, heads, q_len, kv_len); None hides nothing."""
    may_attend = allowed(mask, *scores.shape[-2:])
    return scores if may_attend is None else scores + additive(may_attend, scores.dtype)


def attention(
    attn: nn.Module,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    attention_mask: Any = None,
    *,
    normalise: Callable = normalise,
    rotate: Callable = rotate,
    share_heads: Callable = share_heads,
    scale: Callable = scale,
    soften: Callable = soften,
    hide: Callable = hide,
    **others: Any,
) -> tuple[Tensor, None]:
    """The forward of an attention layer, (batch, seq, dim) -> (batch, seq, dim); any of its steps can be replaced."""
    query, key, value = project(attn, hidden_states)
    query, key = normalise(attn, query, key)
    query, key = rotate(query, position_embeddings), rotate(key, position_embeddings)
    if (cache := others.get(CACHE)) is not None:
        key, value = cache.update(key, value, attn.layer_idx)
    scores = query @ share_heads(attn, key).transpose(-1, -2)  # (batch, heads, q_len, kv_len)
    weights = hide(soften(attn, scale(attn, scores)), attention_mask).softmax(dim=-1)
    mixed = weights @ share_heads(attn, value)  # (batch, heads, seq, head_dim)
    joined = mixed.transpose(1, 2).flatten(2)  # (batch, seq, heads * head_dim)
    return (attn.c_proj(joined) if hasattr(attn, "c_proj") else attn.o_proj(joined)), None


def rewrite(model: nn.Module, **wrong_steps: Callable) -> None:
    """Make the mask bidirectional and compute every layer with `attention`, some of its steps replaced."""
    find_decoder(model).config.is_causal = False
    for attn in find_decoder(model).attentions:
        rebind_forward(attn, partial(attention, **wrong_steps))


# --- the rewrites ----------------------------------------------------------------------------------------------------


def _multiply(scores: Tensor, mask: Any) -> Tensor:
    may_attend = allowed(mask, *scores.shape[-2:])
    return scores if may_attend is None else scores * may_attend.to(scores.dtype)


def _tile_kv_heads(model: nn.Module) -> None:
    groups = find_decoder(model).attentions[0].num_key_value_groups
    kv_heads = find_decoder(model).config.num_key_value_heads
    if kv_heads == 1 or groups == 1:
        raise ConversionError(
            "pitfall 'tiles-kv-heads' needs several KV heads, each shared by several query heads; this model has "
            f"{kv_heads} KV head(s) for {kv_heads * groups} query head(s): both ways agree"
        )
    rewrite(model, share_heads=lambda attn, states: states.repeat(1, groups, 1, 1))


EXHIBITS = (
    Pitfall(
        name="forgets-rope",
        title="A hand-written attention that forgets the rotary embedding",
        code="q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)\n"
        "scores = q @ k.transpose(-1, -2) * self.scaling + padding_mask\n"
        "return self.o_proj(scores.softmax(-1) @ v)",
        story="""Short, readable and bidirectional: every token influences every other, no pad leaks, on every
            backend. But the rotation of queries and keys was the only place where positions entered, so the model
            ignores word order. A test of the mask alone passes; restoring the causal mask and comparing with the
            original shows a different computation.""",
        takes_effect_when="""The mask is bidirectional on every backend and with any padding. The model is destroyed
            in every architecture with rotary positions. GPT-2 adds its positions to the embeddings and is not
            affected.""",
        symptom="computation-changed",
        install=lambda model: rewrite(model, rotate=lambda states, _: states),
        families=ROTARY_FAMILIES,
    ),
    Pitfall(
        name="forgets-scaling",
        title="A hand-written attention that forgets to scale its scores",
        code="scores = q @ k.transpose(-1, -2)   # / math.sqrt(head_dim)\nweights = (scores + mask).softmax(-1)",
        story="""Without the scale the scores are several times too large, and the softmax nearly selects a single key.
            The code runs, rows still sum to one, and the maps look sharper. The factor is not always the one from the
            paper: Gemma 2 and 3 take it from `query_pre_attn_scalar`, which need not be the head dimension.""",
        takes_effect_when="""The mask is bidirectional on every backend and with any padding; the computation differs
            from the original in every architecture.""",
        symptom="computation-changed",
        install=lambda model: rewrite(model, scale=lambda attn, scores: scores),
    ),
    Pitfall(
        name="forgets-softcap",
        title="A hand-written attention that forgets Gemma 2's softcap",
        code="scores = q @ k.transpose(-1, -2) * self.scaling\nweights = (scores + mask).softmax(-1)   # as in Llama",
        story="""This was copied from an architecture that has no such step. Small scores pass the cap almost
            unchanged, so a short test on a fresh model shows hardly any difference. The large scores, which training
            produces, change.""",
        takes_effect_when="""The mask is bidirectional under eager and FlexAttention (Gemma 2 has no SDPA), with any
            padding. The larger the scores, the more the computation differs from the original.""",
        symptom="computation-changed",
        install=lambda model: rewrite(model, soften=lambda attn, scores: scores),
        families=("gemma2",),
    ),
    Pitfall(
        name="forgets-qk-norm",
        title="A hand-written attention that forgets Gemma 3's query and key norms",
        code="q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)\nq, k = apply_rotary_pos_emb(q, k, cos, sin)",
        story="""This is correct for Gemma 1, 2 and Llama, and was copied from there. Gemma 3 normalises each query and
            key between projection and rotation. The weights of this step stay in the checkpoint, load without a
            warning and are not used.""",
        takes_effect_when="""The mask is bidirectional on every backend and with any padding; the computation is not
            Gemma 3's.""",
        symptom="computation-changed",
        install=lambda model: rewrite(model, normalise=lambda attn, query, key: (query, key)),
        families=("gemma3_text",),
    ),
    Pitfall(
        name="tiles-kv-heads",
        title="Grouped queries, with the groups dealt out wrongly",
        code="k = k.repeat(1, self.num_key_value_groups, 1, 1)   # repeat_interleave was meant\n"
        "v = v.repeat(1, self.num_key_value_groups, 1, 1)",
        story="""The shapes are right: one key for each query head. But `repeat` orders the KV heads as 0 1 0 1, while
            the queries expect 0 0 1 1, so most query heads use the keys of another group. With one KV head the two
            orders agree, so such code passes its test on the smallest model of a family.""",
        takes_effect_when="""The mask is bidirectional on every backend and with any padding. The computation is the
            original's only if there is a single KV head, or one for every query head.""",
        symptom="computation-changed",
        install=_tile_kv_heads,
        families=ROTARY_FAMILIES,
    ),
    Pitfall(
        name="multiplies-scores-by-mask",
        title="Multiplying the scores by the mask",
        code="scores = q @ k.transpose(-1, -2) * self.scaling\nweights = (scores * mask).softmax(-1)   # 0 = forbidden",
        story="""Zero times anything is zero, so a forbidden key gets a score of zero, which seems to exclude it. But
            the softmax treats zero as an ordinary score: e to the zero is one. The forbidden keys take part, with a
            weight that does not depend on their content.""",
        takes_effect_when="""When nothing has to be hidden: an unpadded batch in a model without local layers, on
            every backend. With padding the pads leak, in Gemma 2 and 3 the window does, and with a causal mask the
            future would.""",
        symptom="pad-leak",
        install=lambda model: rewrite(model, hide=_multiply),
    ),
)
