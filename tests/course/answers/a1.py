"""Answers to A1. RIGHT: a correct one beside the solution. WRONG: words of the message, and what to change in the solution."""

MASKED = 'scores.masked_fill(~mask, float("-inf")).softmax(dim=-1)'
SPLIT = "y.view(n, heads, width // heads).transpose(0, 1)"

RIGHT = {
    "a1_causal_mask": "def causal_mask(n):\n    return torch.tensor([[j <= i for j in range(n)] for i in range(n)])",
    "a1_window_mask": "def window_mask(n, w):\n    return torch.ones(n, n).tril().triu(-(w - 1)).bool()",
    "a1_padded_mask": """
def padded_mask(lengths, n):
    from labkit import masks

    return (masks.causal() & masks.padding(lengths)).dense(n)
""",
    "a1_scores": "def scores_of(q, k):\n    return torch.einsum('...id,...jd->...ij', q, k) * q.size(-1) ** -0.5",
    "a1_weights": """
def weights_of(scores, mask):
    top = scores.masked_fill(~mask, float("-inf")).amax(-1, keepdim=True).clamp(min=-1e30)
    raised = torch.where(mask, (scores - top).exp(), 0.0)
    return raised / raised.sum(-1, keepdim=True).clamp(min=1e-30)
""",
    "a1_attention": """
def attention(x, w_q, w_k, w_v, heads, mask):
    d = x.shape[1] // heads
    out = []
    for h in range(heads):
        here = slice(h * d, (h + 1) * d)
        q, k, v = x @ w_q[:, here], x @ w_k[:, here], x @ w_v[:, here]
        out.append((q @ k.T / d**0.5).masked_fill(~mask, -torch.inf).softmax(-1) @ v)
    return torch.cat(out, dim=1)
""",
    "a1_who_hears": """
def who_hears(mask, layers):
    step = (mask | torch.eye(len(mask)).bool()).double()
    return torch.linalg.matrix_power(step, layers) > 0
""",
}

WRONG = {
    "a1_causal_mask": [
        ("upper triangle", "tril()", "triu()"),
        ("Is the diagonal in", "tril()", "tril(-1)"),
        ("the other way round", "tril()", "triu(1)"),
        ("to be added to scores", "bool()", "log()"),
        ("make it booleans", ".bool()", ""),
        ("is there a return", "return ", ""),
    ],
    "a1_window_mask": [
        ("<= or <", "< w", "<= w"),
        ("Yours holds", "< w", "< w - 1"),
        ("opens to the right", "(j <= i) & (i - j < w)", "(i - j).abs() < w"),
        ("i - j or j - i", "(j <= i) & (i - j < w)", "(i <= j) & (j - i < w)"),
        ("where does w enter", " & (i - j < w)", ""),
    ],
    "a1_padded_mask": [
        ("as keys", "real[:, None, :]", "real[:, :, None]"),
        ("the future is open", "causal_mask(n)[None] & real[:, None, :]", "real[:, None, :].repeat(1, n, 1)"),
        ("leaves the pads", " < torch", " >= torch"),
        ("in front", "[None, :] < torch.tensor(lengths)", "[None, :] >= n - torch.tensor(lengths)"),
        ("where do the lengths enter", "& real[:, None, :]", "| (real & False)[:, None, :]"),
        ("shape", "[None] & real[:, None, :]", ""),
    ],
    "a1_scores": [
        ("divided by?", " / q.shape[-1] ** 0.5", ""),
        ("divided by d", " ** 0.5", ""),
        ("number of tokens", "shape[-1]", "shape[-2]"),
        ("Keys are rows", "q @ k", "k @ q"),
        ("multiplied", " / ", " * "),
    ],
    "a1_weights": [
        ("came after the softmax", MASKED, "scores.softmax(-1) * mask"),
        ("A score of zero is no ban", MASKED, "(scores * mask).softmax(-1)"),
        ("over the queries", "dim=-1", "dim=0"),
        ("the ones you banned", "~mask", "mask"),
        ("no trace", MASKED, "scores.softmax(-1)"),
        ("exactly zero", MASKED, "(scores - (~mask).float()).softmax(-1)"),
        ("divides zero by zero", ".nan_to_num(0.0)", ""),
        ("shares its weight", 'float("-inf")', "-1e30"),
        (
            "-1e4 in a forbidden",
            'float("-inf")',
            "-1e4",
            "nan_to_num(0.0)",
            "masked_fill(~mask.any(-1, keepdim=True), 0)",
        ),
        ("a softmax that avoids", MASKED, "scores.exp() * mask / (scores.exp() * mask).sum(-1, keepdim=True)"),
    ],
    "a1_attention": [
        ("mixes tokens with heads", SPLIT, "y.reshape(heads, n, width // heads)", "mixed.transpose(0, 1)", "mixed"),
        ("put together", "mixed.transpose(0, 1)", "mixed"),
        ("one head", "n, width = x.shape", "(n, width), heads = x.shape, 1"),
        ("not in force", ", mask) @ v", ", mask | True) @ v"),
        ("the whole width; a head", "scores_of(q, k)", "scores_of(q, k) / heads**0.5"),
        (
            "in steps",
            *(SPLIT, "y.view(n, width // heads, heads).permute(2, 0, 1)"),
            *("mixed.transpose(0, 1)", "mixed.permute(1, 2, 0)"),
        ),
        ("it is x @ w", "x @ w)", "x @ w.T)"),
        ("changed places", "(w_q, w_k", "(w_k, w_q"),
    ],
    "a1_who_hears": [
        ("This is one layer", "range(layers)", "range(1)"),
        ("too many", "range(layers)", "range(layers + 1)"),
        ("too few", "range(layers)", "range(layers - 1)"),
        ("changed places", "heard.bool()", "heard.bool().T"),
        ("residual", "mask | torch.eye(len(mask), dtype=torch.bool)", "mask"),
    ],
}
