"""Answers to A1. RIGHT: a correct one beside the solution. WRONG: words of the message, and what to change in the solution."""

MASKED = 'scores.masked_fill(~mask, float("-inf")).softmax(dim=-1)'
RULE = "    mask = mask | (itself & ~mask.any(-1, keepdim=True))\n"
SPLIT = "y.view(n, heads, width // heads).transpose(0, 1)"
SCALED = "q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5"
PREFIX = "real[:, None, :] & (causal_mask(n) | question[:, None, :])"
WINDOW = "(j <= i) & ((i - j < w) | (j < sinks))"

RIGHT = {
    "a1_causal_mask": "def causal_mask(n):\n    return torch.tensor([[j <= i for j in range(n)] for i in range(n)])",
    "a1_window_mask": """
def window_mask(n, w, sinks):
    return torch.tensor([[j <= i and (j > i - w or j in range(sinks)) for j in range(n)] for i in range(n)])
""",
    "a1_prefix_mask": """
def prefix_mask(lengths, prefixes, n):
    mask = torch.zeros(len(lengths), n, n, dtype=torch.bool)
    for b, (length, prefix) in enumerate(zip(lengths, prefixes)):
        mask[b, :, n - length :] = torch.ones(n, n).tril().bool()[:, n - length :]
        mask[b, :, n - length : n - length + prefix] = True
    return mask
""",
    "a1_scores": """
def biased_scores(q, k, slopes):
    heads, n, d = q.shape
    scores = torch.einsum("hid,hjd->hij", q, k) * d**-0.5
    for i in range(n):
        for j in range(n):
            scores[:, i, j] -= slopes * abs(i - j)
    return scores
""",
    "a1_weights": """
def masked_weights(scores, mask):
    mask = mask.expand_as(scores)
    mask = torch.where(mask.any(-1, keepdim=True), mask, torch.eye(scores.shape[-1]).bool())
    top = scores.masked_fill(~mask, -torch.inf).amax(-1, keepdim=True)
    raised = torch.where(mask, (scores - top).exp(), 0.0)
    return raised / raised.sum(-1, keepdim=True)
""",
    "a1_attention": """
def multi_head(x, w_q, w_k, w_v, slopes, masks):
    out, n, d = [], len(x), x.shape[1] // len(slopes)
    distance = torch.cdist(torch.arange(n)[:, None].float(), torch.arange(n)[:, None].float())
    for h, (slope, mask) in enumerate(zip(slopes, masks)):
        here = slice(h * d, (h + 1) * d)
        q, k, v = x @ w_q[:, here], x @ w_k[:, here], x @ w_v[:, here]
        out.append((q @ k.T / d**0.5 - slope * distance).masked_fill(~mask, -torch.inf).softmax(-1) @ v)
    return torch.cat(out, dim=1)
""",
    "a1_stack": """
def layers_needed(masks):
    n = masks.shape[-1]
    needed = -torch.ones(n, n, dtype=torch.long)
    for j in range(n):
        needed[j, j], informed = 0, {j}
        for layer, mask in enumerate(masks, start=1):
            new = {i for i in range(n) if i not in informed and any(mask[i, k] for k in informed)}
            for i in new:
                needed[i, j] = layer
            informed |= new
    return needed
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
        ("Yours has", "< w", "< w - 1"),
        ("sinks must be causal", WINDOW, "(j <= i) & (i - j < w) | (j < sinks)"),
        ("open to the right", WINDOW, "((i - j).abs() < w) | (j < sinks)"),
        ("Where is `sinks` used", " | (j < sinks)", ""),
        ("i - j or j - i", "return (j <= i)", "i, j = j, i\n    return (j <= i)"),
        ("Where is `w` used", "i - j < w", "i - j < n"),
    ],
    "a1_prefix_mask": [
        ("not at position 0", "< start + torch", "< torch"),
        ("padding is on the right", "torch.arange(n) >= start", "torch.arange(n) < n - start", "< start +", "<"),
        ("Where are the lengths used", PREFIX, "real[:, None, :] & False | causal_mask(n) | question[:, None, :]"),
        ("Where are the prefixes used", "(causal_mask(n) | question[:, None, :])", "causal_mask(n)"),
        ("The answer must stay causal", PREFIX, "real[:, None, :].repeat(1, n, 1)"),
        ("also closed as a query", PREFIX, f"real[:, :, None] & {PREFIX}"),
        ("shape", "[:, None, :] & (causal_mask(n)", "[:, None, None, :] & (causal_mask(n)"),
    ],
    "a1_scores": [
        ("not divided by anything", " / q.shape[-1] ** 0.5", ""),
        (
            "penalty is divided, too",
            SCALED,
            "(q @ k.transpose(-2, -1)",
            "* distance",
            "* distance) / q.shape[-1] ** 0.5",
        ),
        ("divided by d instead", "q.shape[-1] ** 0.5", "q.shape[-1]"),
        ("Is the penalty subtracted", "0.5 - slopes", "0.5 + slopes"),
        ("Is the distance absolute", ".abs()", ""),
        ("no penalty", " - slopes[:, None, None] * distance", ""),
    ],
    "a1_weights": [
        ("came after the softmax", MASKED, "scores.softmax(-1) * mask"),
        ("does not forbid a key: e to", MASKED, "(scores * mask).softmax(-1)"),
        ("over the queries", "dim=-1", "dim=-2"),
        ("Is the mask inverted", "fill(~mask", "fill(mask"),
        ("without a mask", MASKED, "scores.softmax(-1)"),
        ("exactly 0", MASKED, "(scores - (~mask).float()).softmax(-1)"),
        ("divides zero by zero", RULE, ""),
        ("of a closed row are 0", RULE, "", "dim=-1)", "dim=-1).nan_to_num(0.0)"),
        ("as with finfo.min", RULE, "", 'float("-inf")', "torch.finfo(scores.dtype).min"),
        ("All queries attend to themselves", " & ~mask.any(-1, keepdim=True)", ""),
        ("a score of -1e4", 'float("-inf")', "-1e4"),
        ("a softmax that avoids", MASKED, "scores.exp() * mask / (scores.exp() * mask).sum(-1, keepdim=True)"),
    ],
    "a1_attention": [
        ("mixes tokens with heads", SPLIT, "y.reshape(heads, n, width // heads)", "mixed.transpose(0, 1)", "mixed"),
        ("put together", "mixed.transpose(0, 1)", "mixed"),
        (
            "one head",
            "(n, width), heads = x.shape, len(slopes)",
            "(n, width), heads, slopes, masks = x.shape, 1, slopes[:1], masks[:1]",
        ),
        ("the mask of the first", "slopes), masks)", "slopes), masks[0])"),
        ("masks are not used", "slopes), masks)", "slopes), masks | True)"),
        ("the whole width; a head", "biased_scores(q, k, slopes)", "biased_scores(q / heads**0.5, k, slopes)"),
        ("it is x @ w", "x @ w)", "x @ w.T)"),
        ("changed places", "(w_q, w_k", "(w_k, w_q"),
    ],
    "a1_stack": [
        ("direct attention", "mask.float() @ reached.float() > 0", "mask"),
        ("the mask of the first", "enumerate(masks,", "enumerate(masks[:1].expand_as(masks),"),
        ("reverse order", "enumerate(masks,", "enumerate(masks.flip(0),"),
        ("wrong order", "mask.float() @ reached.float()", "reached.float() @ mask.float()"),
        ("Rows and columns", "return needed", "return needed.T"),
        ("counted from 0", "start=1", "start=0"),
        ("overwrite the first", "reached & (needed < 0)", "reached"),
        ("residual", "reached = reached | (mask", "reached = (mask"),
    ],
}
