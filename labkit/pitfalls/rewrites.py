"""Rewrites: attention written anew by hand. The mask comes out right, and the arithmetic around it does not.

All of these start with `config.is_causal = False`, so the mask they are handed is bidirectional and knows the
padding (what that switch leaves open, see config-flag-alone, they inherit).
The steps are small functions, and an exhibit is a forward pass that leaves one of them out or gets it wrong.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from labkit.decoder.anatomy import find_decoder
from labkit.errors import ConversionError
from labkit.pitfalls.exhibit import Pitfall
from labkit.pitfalls.interventions import (
    ROTARY_FAMILIES,
    TEXT_FAMILIES,
    additive,
    allowed,
    rebind_forward,
)

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


def scores_of(attn: nn.Module, query: Tensor, key: Tensor) -> Tensor:
    """Scaled scores (batch, heads, q_len, kv_len)."""
    return query @ key.transpose(-1, -2) * attn.scaling


def soften(attn: nn.Module, scores: Tensor) -> Tensor:
    """Gemma 2 bends large scores towards a cap; the others have no such step."""
    cap = getattr(attn, "attn_logit_softcapping", None)
    return scores if cap is None else torch.tanh(scores / cap) * cap


def hide(scores: Tensor, mask: Any) -> Tensor:
    """Add the mask to the scores, whatever form it comes in; None hides nothing."""
    may_attend = allowed(mask, *scores.shape[-2:])
    return scores if may_attend is None else scores + additive(may_attend, scores.dtype)


def collect(attn: nn.Module, scores: Tensor, value: Tensor) -> Tensor:
    """softmax(scores) @ value, heads joined, projected back: (batch, seq, dim)."""
    mixed = scores.softmax(dim=-1) @ value  # (batch, heads, seq, head_dim)
    joined = mixed.transpose(1, 2).flatten(2)  # (batch, seq, heads * head_dim)
    return attn.c_proj(joined) if hasattr(attn, "c_proj") else attn.o_proj(joined)


def remember(attn: nn.Module, cache: Any, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Append to the key-value cache, if there is one, and read all of it."""
    return (key, value) if cache is None else cache.update(key, value, attn.layer_idx)


# --- the rewrites ----------------------------------------------------------------------------------------------------


def attention_in_full(attn, hidden_states, position_embeddings=None, attention_mask=None, past_key_values=None, **_):
    """Every step in its place: the rewrite that all the faulty ones are measured against. Equals the library's own."""
    query, key, value = project(attn, hidden_states)
    query, key = normalise(attn, query, key)
    query, key = rotate(query, position_embeddings), rotate(key, position_embeddings)
    key, value = remember(attn, past_key_values, key, value)
    scores = soften(attn, scores_of(attn, query, share_heads(attn, key)))
    return collect(attn, hide(scores, attention_mask), share_heads(attn, value)), None


def _without_rope(attn, hidden_states, position_embeddings=None, attention_mask=None, past_key_values=None, **_):
    return attention_in_full(attn, hidden_states, None, attention_mask, past_key_values)


def _without_scaling(attn, hidden_states, position_embeddings=None, attention_mask=None, past_key_values=None, **_):
    query, key, value = project(attn, hidden_states)
    query, key = normalise(attn, query, key)
    query, key = rotate(query, position_embeddings), rotate(key, position_embeddings)
    key, value = remember(attn, past_key_values, key, value)
    scores = soften(attn, query @ share_heads(attn, key).transpose(-1, -2))
    return collect(attn, hide(scores, attention_mask), share_heads(attn, value)), None


def _without_softcap(attn, hidden_states, position_embeddings=None, attention_mask=None, past_key_values=None, **_):
    query, key, value = project(attn, hidden_states)
    query, key = rotate(query, position_embeddings), rotate(key, position_embeddings)
    key, value = remember(attn, past_key_values, key, value)
    scores = scores_of(attn, query, share_heads(attn, key))
    return collect(attn, hide(scores, attention_mask), share_heads(attn, value)), None


def _without_qk_norm(attn, hidden_states, position_embeddings=None, attention_mask=None, past_key_values=None, **_):
    query, key, value = project(attn, hidden_states)
    query, key = rotate(query, position_embeddings), rotate(key, position_embeddings)
    key, value = remember(attn, past_key_values, key, value)
    scores = soften(attn, scores_of(attn, query, share_heads(attn, key)))
    return collect(attn, hide(scores, attention_mask), share_heads(attn, value)), None


def _with_tiled_heads(attn, hidden_states, position_embeddings=None, attention_mask=None, past_key_values=None, **_):
    query, key, value = project(attn, hidden_states)
    query, key = normalise(attn, query, key)
    query, key = rotate(query, position_embeddings), rotate(key, position_embeddings)
    key, value = remember(attn, past_key_values, key, value)
    groups = attn.num_key_value_groups
    key, value = key.repeat(1, groups, 1, 1), value.repeat(1, groups, 1, 1)
    return collect(attn, hide(soften(attn, scores_of(attn, query, key)), attention_mask), value), None


def _with_multiplied_mask(
    attn, hidden_states, position_embeddings=None, attention_mask=None, past_key_values=None, **_
):
    query, key, value = project(attn, hidden_states)
    query, key = normalise(attn, query, key)
    query, key = rotate(query, position_embeddings), rotate(key, position_embeddings)
    key, value = remember(attn, past_key_values, key, value)
    scores = soften(attn, scores_of(attn, query, share_heads(attn, key)))
    may_attend = allowed(attention_mask, *scores.shape[-2:])
    if may_attend is not None:
        scores = scores * may_attend.to(scores.dtype)
    return collect(attn, scores, share_heads(attn, value)), None


def rewrite(model: nn.Module, forward: Callable[..., Any]) -> None:
    """Switch the mask to bidirectional and give every attention layer the hand-written `forward`."""
    find_decoder(model).config.is_causal = False
    for attn in find_decoder(model).attentions:
        rebind_forward(attn, forward)


def _tile_kv_heads(model: nn.Module) -> None:
    attn = find_decoder(model).attentions[0]
    kv_heads = find_decoder(model).config.num_key_value_heads
    if kv_heads == 1 or attn.num_key_value_groups == 1:
        raise ConversionError(
            "pitfall 'tiles-kv-heads' needs several KV heads, each shared by several query heads; this model has "
            f"{kv_heads} KV head(s) for {kv_heads * attn.num_key_value_groups} query head(s): both ways agree"
        )
    rewrite(model, _with_tiled_heads)


EXHIBITS = (
    Pitfall(
        name="forgets-rope",
        title="A hand-written attention that forgets the rotary embedding",
        code="q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)\n"
        "scores = q @ k.transpose(-1, -2) * self.scaling + padding_mask\n"
        "return self.o_proj(scores.softmax(-1) @ v)",
        story="""Short, readable and bidirectional beyond doubt: every token influences every other, no pad leaks,
            on every backend. It is also blind to word order, because the rotation of queries and keys was the only
            place where a position came in. A test of the mask alone gives it full marks; putting the causal mask
            back and comparing with the original shows another computation.""",
        takes_effect_when="""The mask does, on every backend and with any padding. The model does not survive it, in
            any architecture with rotary positions. GPT-2 adds its positions to the embeddings and has nothing to
            forget here.""",
        families=ROTARY_FAMILIES,
        symptom="computation-changed",
        install=lambda model: rewrite(model, _without_rope),
    ),
    Pitfall(
        name="forgets-scaling",
        title="A hand-written attention that forgets to scale its scores",
        code="scores = q @ k.transpose(-1, -2)   # / math.sqrt(head_dim)\nweights = (scores + mask).softmax(-1)",
        story="""Without the scale the scores are several times too large and the softmax nearly picks a single key.
            Everything still runs, rows still sum to one, maps even look crisper. The factor is not always the one
            from the paper either: Gemma 2 and 3 take it from `query_pre_attn_scalar`, which need not be the head
            dimension.""",
        takes_effect_when="""The mask is bidirectional on every backend and with any padding; the computation is not
            the original's in any architecture.""",
        families=TEXT_FAMILIES,
        symptom="computation-changed",
        install=lambda model: rewrite(model, _without_scaling),
    ),
    Pitfall(
        name="forgets-softcap",
        title="A hand-written attention that forgets Gemma 2's softcap",
        code="scores = q @ k.transpose(-1, -2) * self.scaling\nweights = (scores + mask).softmax(-1)   # as in Llama",
        story="""Copied from an architecture that has no such step. Small scores pass the cap almost unchanged, so a
            short test on a fresh model sees hardly a difference; it is the large scores, the ones training has
            worked for, that come out different.""",
        takes_effect_when="""The mask is bidirectional under eager and FlexAttention (Gemma 2 has no SDPA), with any
            padding. The computation departs from the original the more, the larger the scores.""",
        families=("gemma2",),
        symptom="computation-changed",
        install=lambda model: rewrite(model, _without_softcap),
    ),
    Pitfall(
        name="forgets-qk-norm",
        title="A hand-written attention that forgets Gemma 3's query and key norms",
        code="q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)\nq, k = apply_rotary_pos_emb(q, k, cos, sin)",
        story="""Correct for Gemma 1, 2 and Llama, and pasted from there. Gemma 3 normalises each query and key
            between projection and rotation; the step has weights of its own, which stay in the checkpoint, load
            without a warning and are not used any more.""",
        takes_effect_when="""The mask is bidirectional on every backend and with any padding; the computation is not
            Gemma 3's.""",
        families=("gemma3_text",),
        symptom="computation-changed",
        install=lambda model: rewrite(model, _without_qk_norm),
    ),
    Pitfall(
        name="tiles-kv-heads",
        title="Grouped queries, with the groups dealt out wrongly",
        code="k = k.repeat(1, self.num_key_value_groups, 1, 1)   # repeat_interleave was meant\n"
        "v = v.repeat(1, self.num_key_value_groups, 1, 1)",
        story="""The shapes are right: as many keys as queries, head by head. But `repeat` lays the KV heads down as
            0 1 0 1, while the queries expect 0 0 1 1, so most query heads talk to a stranger's keys. With one KV
            head for all the two agree, which is how such code passes its test on the smallest model of a family.""",
        takes_effect_when="""The mask is bidirectional on every backend and with any padding. The computation is the
            original's only if there is a single KV head, or one for every query head.""",
        families=ROTARY_FAMILIES,
        symptom="computation-changed",
        install=_tile_kv_heads,
    ),
    Pitfall(
        name="multiplies-scores-by-mask",
        title="Multiplying the scores by the mask",
        code="scores = q @ k.transpose(-1, -2) * self.scaling\nweights = (scores * mask).softmax(-1)   # 0 = forbidden",
        story="""Zero times anything is zero, so a forbidden key gets a score of zero, and zero sounds like nothing.
            To a softmax it is the score of a perfectly ordinary key: e to the zero is one. Whatever this mask was
            to hide is seen, only without regard to what it says.""",
        takes_effect_when="""When there is nothing to hide: an unpadded batch in a model without local layers, on
            every backend. With padding the pads leak, in Gemma 2 and 3 the window does, and with a causal mask the
            future would.""",
        families=TEXT_FAMILIES,
        symptom="pad-leak",
        install=lambda model: rewrite(model, _with_multiplied_mask),
    ),
)
