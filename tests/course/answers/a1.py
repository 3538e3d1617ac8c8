"""Answers to A1. RIGHT: other correct ones. WRONG: misconceptions that run, each with words that its message must have."""

RIGHT = {
    "a1_causal_mask": [
        "def causal_mask(n):\n    return torch.tensor([[j <= i for j in range(n)] for i in range(n)])",
        "def causal_mask(n):\n    from labkit import masks\n\n    return masks.causal().dense(n)",
        "causal_mask = lambda n: torch.arange(n)[:, None] >= torch.arange(n)",
    ],
    "a1_window_mask": [
        "def window_mask(n, w):\n    return torch.tensor([[i - w < j <= i for j in range(n)] for i in range(n)])",
        "def window_mask(n, w):\n    return torch.ones(n, n).tril().triu(-(w - 1)).bool()",
    ],
    "a1_padded_mask": [
        """
def padded_mask(lengths, n):
    mask = torch.zeros(len(lengths), n, n, dtype=torch.bool)
    for b, length in enumerate(lengths):
        for i in range(n):
            for j in range(length):
                mask[b, i, j] = j <= i
    return mask
""",
        "def padded_mask(lengths, n):\n    from labkit import masks\n\n    return (masks.causal() & masks.padding(lengths)).dense(n)",
    ],
    "a1_scores": [
        "def scores_of(q, k):\n    return torch.einsum('...id,...jd->...ij', q, k) * q.size(-1) ** -0.5",
        """
def scores_of(q, k):
    out = torch.zeros(*q.shape[:-1], k.shape[-2])
    for b in range(q.shape[0]) if q.dim() == 3 else [...]:
        for i in range(q.shape[-2]):
            for j in range(k.shape[-2]):
                out[b, i, j] = (q[b, i] * k[b, j]).sum() / q.shape[-1] ** 0.5
    return out
""",
    ],
    "a1_weights": [
        """
def weights_of(scores, mask):
    top = scores.masked_fill(~mask, float("-inf")).amax(-1, keepdim=True).clamp(min=-1e30)
    raised = torch.where(mask, (scores - top).exp(), 0.0)
    return raised / raised.sum(-1, keepdim=True).clamp(min=1e-30)
""",
        """
def weights_of(scores, mask):
    weights = torch.zeros_like(scores)
    for i in range(len(scores)):
        if mask[i].any():
            weights[i, mask[i]] = scores[i][mask[i]].softmax(0)
    return weights
""",
    ],
    "a1_attention": [
        """
def attention(x, w_q, w_k, w_v, heads, mask):
    d = x.shape[1] // heads
    out = []
    for h in range(heads):
        here = slice(h * d, (h + 1) * d)
        q, k, v = x @ w_q[:, here], x @ w_k[:, here], x @ w_v[:, here]
        out.append((q @ k.T / d**0.5).masked_fill(~mask, -torch.inf).softmax(-1) @ v)
    return torch.cat(out, dim=1)
""",
    ],
    "a1_who_hears": [
        """
def who_hears(mask, layers):
    n = len(mask)
    heard = torch.eye(n, dtype=torch.bool)
    for _ in range(layers):
        heard = torch.stack([heard[i] | heard[mask[i]].any(0) for i in range(n)])
    return heard
""",
        """
def who_hears(mask, layers):
    step = (mask | torch.eye(len(mask)).bool()).double()
    return torch.linalg.matrix_power(step, layers) > 0
""",
    ],
}

WRONG = {
    "a1_causal_mask": [
        ("upper triangle", "def causal_mask(n):\n    return torch.ones(n, n).triu().bool()"),
        ("Is the diagonal in", "def causal_mask(n):\n    return torch.ones(n, n).tril(-1).bool()"),
        ("the other way round", "def causal_mask(n):\n    return torch.ones(n, n).triu(1).bool()"),
        ("to be added to scores", "def causal_mask(n):\n    return torch.full((n, n), float('-inf')).triu(1)"),
        ("make it booleans", "def causal_mask(n):\n    return torch.ones(n, n).tril()"),
        ("is there a return", "def causal_mask(n):\n    torch.ones(n, n).tril().bool()"),
    ],
    "a1_window_mask": [
        ("<= or <", "def window_mask(n, w):\n    return torch.ones(n, n).tril().triu(-w).bool()"),
        ("Yours holds", "def window_mask(n, w):\n    return torch.ones(n, n).tril().triu(2 - w).bool()"),
        (
            "opens to the right",
            "def window_mask(n, w):\n    i = torch.arange(n)\n    return (i[:, None] - i).abs() < w",
        ),
        (
            "i - j or j - i",
            "def window_mask(n, w):\n    i = torch.arange(n)\n    return ((i - i[:, None]) >= 0) & ((i - i[:, None]) < w)",
        ),
        ("where does w enter", "def window_mask(n, w):\n    return causal_mask(n)"),
    ],
    "a1_padded_mask": [
        (
            "as keys",
            "def padded_mask(lengths, n):\n    real = torch.arange(n) < torch.tensor(lengths)[:, None]\n"
            "    return causal_mask(n) & real[:, :, None]",
        ),
        (
            "the future is open",
            "def padded_mask(lengths, n):\n    real = torch.arange(n) < torch.tensor(lengths)[:, None]\n"
            "    return real[:, None, :].repeat(1, n, 1)",
        ),
        (
            "leaves the pads",
            "def padded_mask(lengths, n):\n    pad = torch.arange(n) >= torch.tensor(lengths)[:, None]\n"
            "    return causal_mask(n) & pad[:, None, :]",
        ),
        (
            "in front",
            "def padded_mask(lengths, n):\n    real = torch.arange(n) >= n - torch.tensor(lengths)[:, None]\n"
            "    return causal_mask(n) & real[:, None, :]",
        ),
        (
            "where do the lengths enter",
            "def padded_mask(lengths, n):\n    return causal_mask(n).repeat(len(lengths), 1, 1)",
        ),
        ("shape", "def padded_mask(lengths, n):\n    return causal_mask(n)"),
    ],
    "a1_scores": [
        ("divided by?", "def scores_of(q, k):\n    return q @ k.transpose(-2, -1)"),
        ("divided by d", "def scores_of(q, k):\n    return q @ k.transpose(-2, -1) / q.shape[-1]"),
        ("number of tokens", "def scores_of(q, k):\n    return q @ k.transpose(-2, -1) / q.shape[-2] ** 0.5"),
        ("Keys are rows", "def scores_of(q, k):\n    return k @ q.transpose(-2, -1) / q.shape[-1] ** 0.5"),
        ("multiplied", "def scores_of(q, k):\n    return q @ k.transpose(-2, -1) * q.shape[-1] ** 0.5"),
    ],
    "a1_weights": [
        ("came after the softmax", "def weights_of(scores, mask):\n    return scores.softmax(-1) * mask"),
        ("is no ban", "def weights_of(scores, mask):\n    return (scores * mask).softmax(-1)"),
        (
            "over the queries",
            "def weights_of(scores, mask):\n    return scores.masked_fill(~mask, -torch.inf).softmax(0).nan_to_num(0)",
        ),
        (
            "the ones you banned",
            "def weights_of(scores, mask):\n    return scores.masked_fill(mask, -torch.inf).softmax(-1).nan_to_num(0)",
        ),
        ("no trace", "def weights_of(scores, mask):\n    return scores.softmax(-1)"),
        (
            "divides zero by zero",
            "def weights_of(scores, mask):\n    return scores.masked_fill(~mask, -torch.inf).softmax(-1)",
        ),
        (
            "is no ban",
            "def weights_of(scores, mask):\n    return scores.masked_fill(~mask, -1e4).softmax(-1).nan_to_num(0) * mask.any(-1, keepdim=True)",
        ),
        (
            "a softmax that knows",
            "def weights_of(scores, mask):\n    raised = scores.exp() * mask\n"
            "    return raised / raised.sum(-1, keepdim=True) if mask.any(-1).all() else "
            "scores.masked_fill(~mask, -torch.inf).softmax(-1).nan_to_num(0)",
        ),
        ("may not see", "def weights_of(scores, mask):\n    return scores.masked_fill(~mask, -1e30).softmax(-1)"),
    ],
    "a1_attention": [
        (
            "mixes tokens with heads",
            "def attention(x, w_q, w_k, w_v, heads, mask):\n"
            "    n, width = x.shape\n"
            "    q, k, v = ((x @ w).reshape(heads, n, width // heads) for w in (w_q, w_k, w_v))\n"
            "    return (weights_of(scores_of(q, k), mask) @ v).reshape(n, width)",
        ),
        (
            "put together",
            "def attention(x, w_q, w_k, w_v, heads, mask):\n"
            "    n, width = x.shape\n"
            "    q, k, v = ((x @ w).view(n, heads, -1).transpose(0, 1) for w in (w_q, w_k, w_v))\n"
            "    return (weights_of(scores_of(q, k), mask) @ v).reshape(n, width)",
        ),
        (
            "one head",
            "def attention(x, w_q, w_k, w_v, heads, mask):\n"
            "    return weights_of(scores_of(x @ w_q, x @ w_k), mask) @ (x @ w_v)",
        ),
        (
            "not in force",
            "def attention(x, w_q, w_k, w_v, heads, mask):\n"
            "    n, width = x.shape\n"
            "    q, k, v = ((x @ w).view(n, heads, -1).transpose(0, 1) for w in (w_q, w_k, w_v))\n"
            "    return (scores_of(q, k).softmax(-1) @ v).transpose(0, 1).reshape(n, width)",
        ),
        (
            "in steps",
            "def attention(x, w_q, w_k, w_v, heads, mask):\n"
            "    n, width = x.shape\n"
            "    q, k, v = ((x @ w).view(n, -1, heads).permute(2, 0, 1) for w in (w_q, w_k, w_v))\n"
            "    return (weights_of(scores_of(q, k), mask) @ v).permute(1, 2, 0).reshape(n, width)",
        ),
        (
            "it is x @ w",
            "def attention(x, w_q, w_k, w_v, heads, mask):\n"
            "    n, width = x.shape\n"
            "    q, k, v = ((x @ w.T).view(n, heads, -1).transpose(0, 1) for w in (w_q, w_k, w_v))\n"
            "    return (weights_of(scores_of(q, k), mask) @ v).transpose(0, 1).reshape(n, width)",
        ),
        (
            "changed places",
            "def attention(x, w_q, w_k, w_v, heads, mask):\n"
            "    n, width = x.shape\n"
            "    q, k, v = ((x @ w).view(n, heads, -1).transpose(0, 1) for w in (w_k, w_q, w_v))\n"
            "    return (weights_of(scores_of(q, k), mask) @ v).transpose(0, 1).reshape(n, width)",
        ),
    ],
    "a1_who_hears": [
        ("This is one layer", "def who_hears(mask, layers):\n    return mask | torch.eye(len(mask)).bool()"),
        (
            "too many",
            "def who_hears(mask, layers):\n    step = (mask | torch.eye(len(mask)).bool()).float()\n"
            "    return torch.linalg.matrix_power(step, layers + 1) > 0",
        ),
        (
            "changed places",
            "def who_hears(mask, layers):\n    step = (mask | torch.eye(len(mask)).bool()).float()\n"
            "    return (torch.linalg.matrix_power(step, layers) > 0).T",
        ),
        (
            "residual",
            "def who_hears(mask, layers):\n    return torch.linalg.matrix_power(mask.float(), layers) > 0",
        ),
    ],
}
