"""Rewrites: attention written again by hand. The mask is right, and the computation around it is not.

`attention` computes what the library's own attention does; an exhibit gets one step wrong. All of them set
`config.is_causal = False`, so the mask that they receive is bidirectional and contains the padding.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from labkit.decoder.anatomy import CACHE, find_decoder
from labkit.errors import ConversionError
from labkit.masks import additive_of
from labkit.pitfalls.exhibit import ROTARY_FAMILIES, Pitfall
from labkit.pitfalls.interventions import allowed, rebind_forward


def attention(
    attn: nn.Module,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    attention_mask: Any = None,
    *,
    mistake: str = "",
    **others: Any,
) -> tuple[Tensor, None]:
    """The forward of an attention layer of any of the families, (batch, seq, dim) -> (batch, seq, dim).

    `mistake` is the name of the exhibit whose step is done wrongly; "" does every step right.
    """
    if hasattr(attn, "c_attn"):  # GPT-2: one projection, and no positions
        states = attn.c_attn(hidden_states).split(attn.split_size, dim=2)
    else:
        states = attn.q_proj(hidden_states), attn.k_proj(hidden_states), attn.v_proj(hidden_states)
    by_head = (*hidden_states.shape[:2], -1, attn.head_dim)
    query, key, value = (part.view(by_head).transpose(1, 2) for part in states)  # (batch, heads or kv_heads, seq, dim)
    if hasattr(attn, "q_norm") and mistake != "forgets-qk-norm":  # Gemma 3
        query, key = attn.q_norm(query), attn.k_norm(key)
    if position_embeddings is not None and mistake != "forgets-rope":
        query, key = _rotated(query, *position_embeddings), _rotated(key, *position_embeddings)
    if (cache := others.get(CACHE)) is not None:
        key, value = cache.update(key, value, attn.layer_idx)
    groups = getattr(attn, "num_key_value_groups", 1)  # query heads for each KV head
    if mistake == "tiles-kv-heads":
        key, value = key.repeat(1, groups, 1, 1), value.repeat(1, groups, 1, 1)
    else:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = query @ key.transpose(-1, -2)  # (batch, heads, q_len, kv_len)
    if mistake != "forgets-scaling":
        scores = scores * attn.scaling
    cap = getattr(attn, "attn_logit_softcapping", None)
    if cap is not None and mistake != "forgets-softcap":  # Gemma 2
        scores = torch.tanh(scores / cap) * cap
    may_attend = allowed(attention_mask, *scores.shape[-2:])
    if may_attend is not None and mistake == "multiplies-scores-by-mask":
        scores = scores * may_attend.to(scores.dtype)
    elif may_attend is not None:
        scores = scores + additive_of(may_attend, scores.dtype)
    mixed = (scores.softmax(dim=-1) @ value).transpose(1, 2).flatten(2)  # (batch, seq, heads * head_dim)
    return (attn.c_proj if hasattr(attn, "c_proj") else attn.o_proj)(mixed), None


def _rotated(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The rotary embedding in the half-split form. states: (batch, heads, seq, head_dim); cos, sin without heads."""
    left, right = states.chunk(2, dim=-1)
    return states * cos.unsqueeze(1) + torch.cat((-right, left), dim=-1) * sin.unsqueeze(1)


def rewrite(model: nn.Module, mistake: str = "") -> None:
    """Make the mask bidirectional and compute every layer with `attention`."""
    find_decoder(model).config.is_causal = False
    for attn in find_decoder(model).attentions:
        rebind_forward(attn, partial(attention, mistake=mistake))


def _tile_kv_heads(model: nn.Module) -> None:
    groups = find_decoder(model).attentions[0].num_key_value_groups
    kv_heads = find_decoder(model).config.num_key_value_heads
    if kv_heads == 1 or groups == 1:
        raise ConversionError(
            "pitfall 'tiles-kv-heads' needs several KV heads, each shared by several query heads; this model has "
            f"{kv_heads} KV head(s) for {kv_heads * groups} query head(s): both ways agree"
        )
    rewrite(model, "tiles-kv-heads")


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
        install=partial(rewrite, mistake="forgets-rope"),
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
        install=partial(rewrite, mistake="forgets-scaling"),
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
        install=partial(rewrite, mistake="forgets-softcap"),
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
        install=partial(rewrite, mistake="forgets-qk-norm"),
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
        install=partial(rewrite, mistake="multiplies-scores-by-mask"),
    ),
)
