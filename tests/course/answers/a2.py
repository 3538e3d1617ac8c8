"""Answers to A2. RIGHT: a correct one beside the solution. WRONG: words of the message, and what to change in the solution."""

RIGHT = {
    "a2_noticed": """
def who_notices(model, ids, j, other):
    both = ids.repeat(2, 1)
    both[1, j] = other
    logits = model(input_ids=both).logits.detach()
    return (logits[0] - logits[1]).abs().amax(-1) > 0
""",
    "a2_influence": """
def influence(model, ids):
    n, size = ids.shape[1], model.config.vocab_size
    rows, seen = ids.repeat(3, 1), torch.zeros(n, n, dtype=torch.bool)
    with torch.no_grad():
        before = model(input_ids=rows).logits
        for j in range(n):
            changed = rows.clone()
            changed[:, j] = (ids[0, j] + torch.tensor([1, 7, 29])) % size
            seen[:, j] = (model(input_ids=changed).logits != before).any(-1).any(0)
    return seen
""",
    "a2_verdict": """
def verdict(seen):
    past, future = seen[torch.ones_like(seen).tril()], seen[torch.ones_like(seen).triu(1)]
    return ("bidirectional" if future.all() else "mixed" if future.any() else "causal") if past.all() else "mixed"
""",
    "a2_padding": """
def influence_padded(model, ids, pads):
    n = ids.shape[1]
    rows, real = ids.repeat(2, 1), torch.ones(2, n, dtype=torch.long)
    rows[1, n - pads :] = 0
    real[1, n - pads :] = 0
    before = model(input_ids=rows, attention_mask=real).logits.detach()
    seen = torch.zeros(2, n, n, dtype=torch.bool)
    for r in range(2):
        for j in range(n):
            for other in (11, 23, 35, 47):
                if other != rows[r, j]:
                    changed = rows.clone()
                    changed[r, j] = other
                    after = model(input_ids=changed, attention_mask=real).logits.detach()
                    seen[r, :, j] |= (after != before).any(-1)[r]
    seen[1, n - pads :] = False
    return seen
""",
    "a2_heads": """
def head_influence(model, ids, layer):
    n, heads = ids.shape[1], model.config.n_head
    block, found, kept = model.transformer.h[layer], [], []
    hook = block.register_forward_pre_hook(lambda _, args, kwargs: kept.append((args, kwargs)), with_kwargs=True)
    with torch.no_grad():
        model(input_ids=ids)
    hook.remove()
    (args, kwargs) = kept[0]
    hook = block.attn.c_proj.register_forward_pre_hook(lambda _, args: found.append(args[0][0]))
    with torch.no_grad():
        for j in range(-1, n):
            hidden = args[0].clone()
            if j >= 0:
                hidden[0, j] = torch.arange(hidden.shape[-1]).float().sin()
            attn = block.ln_1(hidden)
            named = dict(kwargs)
            mask = named.pop("attention_mask", args[2] if len(args) > 2 else None)
            block(hidden, None, mask, **{k: v for k, v in named.items() if k in ("is_causal",)})
    hook.remove()
    seen = torch.zeros(heads, n, n, dtype=torch.bool)
    for j in range(n):
        for h, (a, b) in enumerate(zip(found[0].chunk(heads, -1), found[j + 1].chunk(heads, -1))):
            seen[h, :, j] = (a != b).any(-1)
    return seen
""",
    "a2_same": """
def same_computation(original, converted, ids):
    with torch.no_grad(), labkit.masked(original, masks.bidirectional()), labkit.masked(converted, masks.bidirectional()):
        return bool((original(input_ids=ids).logits - converted(input_ids=ids).logits).abs().max() < 1e-4)
""",
    "a2_full_mask": """
def full_mask(attention_mask):
    batch, n = attention_mask.shape
    mask = torch.zeros(batch, 1, n, n)
    for b in range(batch):
        for key in range(n):
            if attention_mask[b, key] == 0:
                mask[b, 0, :, key] = float("-inf")
    return mask
""",
}

CHANGED = """
def influence(model, ids):
    n, size = ids.shape[1], model.config.vocab_size
    seen, before, changed = torch.zeros(n, n).bool(), model(input_ids=ids).logits, ids.clone()
    for j in range(n):
        for step in (1, 7, 29):
            changed[0, j] = (ids[0, j] + step) % size
            seen[:, j] |= ((model(input_ids=changed).logits - before).abs() > 0).any(-1)[0]
        changed[0, j] = ids[0, j]
    return seen
"""
ALLCLOSE, FULL = "torch.allclose(found, wanted, atol=1e-4)", ".masked_fill(pad, torch.finfo(torch.float32).min)"
BOTH_LOGITS, SEEN = "logits_are_right(alone) and logits_are_right(beside)", "torch.equal(seen, wanted)"
HEADS = "verdict(head) for layer in heads for head in layer"
MASKS = f"masks_are_full() and {BOTH_LOGITS}"
ROWS_2_ON = '"bidirectional" if head[2:].all() else "mixed"'
ANY_FUTURE = '"bidirectional" if head.triu(1).any() else "causal"'
PADDED_ROW = "torch.equal(influence_padded(converted, ids, pads)[1], (beside[1, :, None] & beside[1]).bool())"

WRONG = {
    "a2_noticed": [
        ("Did you clone", "changed = ids.clone()", "changed = ids"),
        ("best guess", "(before != after).any(-1)[0]", "(before.argmax(-1) != after.argmax(-1))[0]"),
        ("Was another one changed", "[0]\n", "[0] & (torch.arange(ids.shape[1]) != j)\n"),
        ("shape", ".any(-1)[0]", ".any(-1)"),
    ],
    "a2_influence": [
        ("Rows and columns", "seen[:, j]", "seen[j]"),
        ("pile up", CHANGED.replace("        changed[0, j] = ids[0, j]\n", "")),
        ("twins", "(1, 7, 29)", "(1,)"),
        ("small differences", CHANGED.replace("> 0", "> 1e-2")),
        ("diagonal is missing", "return seen", "return seen & ~torch.eye(n).bool()"),
    ],
    "a2_verdict": [
        ("A single cell", "torch.equal(seen, full)", "seen.triu(1).any()", "torch.equal(seen, full.tril())", "True"),
        ("one corner", '"causal" if torch.equal(seen, full.tril())', '"causal" if not seen[0, -1]'),
        ("reads no text", "torch.equal(seen, full.tril())", "not seen.triu(1).any()"),
        ("symmetric", "torch.equal(seen, full)", "torch.equal(seen, seen.T)"),
        ("nobody what came before", "torch.equal(seen, full)", "torch.equal(seen | full.tril(), full)"),
    ],
    "a2_padding": [
        ("Did the mask go along", ", attention_mask=real", ""),
        ("outputs of pads", " & real.bool()[:, :, None]", ""),
        ("run alone", "    return seen", "    seen[0] = influence(model, ids)\n    return seen"),
        ("in a pad's place", "    return seen", "    seen[1, :, n - pads :] = False\n    return seen"),
    ],
    "a2_heads": [
        (
            "gathered in several layers",
            "def head_influence(model, ids, layer):\n    return influence(model, ids).expand(model.config.n_head, -1, -1)",
        ),
        ("cut in the wrong places", "view(n, heads, -1)", "view(n, -1, heads).transpose(1, 2)"),
        ("LayerNorm removes", "+= push", "+= 1e-7"),
        ("Rows and columns", "transpose(0, 1)", "permute(1, 2, 0)"),
        ("must be undone", "in hooks:", "in hooks[:1]:", "found[0][0]", "found[-1][0]"),
    ],
    "a2_same": [
        ("nothing else. Which mask is in force", "labkit.masked(converted, masks.causal())", "torch.no_grad()"),
        ("How equal must they be", ALLCLOSE, "torch.equal(found, wanted)"),
        (
            "what it does with them",
            "def same_computation(original, converted, ids):\n    ours, theirs = original.state_dict(), converted.state_dict()\n"
            "    return all(torch.equal(ours[name], theirs[name]) for name in ours)",
        ),
        ("best guesses", ALLCLOSE, "bool((found - wanted).abs().mean() < 0.05)"),
        ("late in the sentence", "(found, wanted,", "(found[:, :3], wanted[:, :3],"),
    ],
    "a2_full_mask": [
        ("True counts as 1", f"torch.zeros(batch, 1, n, n){FULL}", "~pad"),
        ("Ones and zeros", f"torch.zeros(batch, 1, n, n){FULL}", "(~pad).float()"),
        ("Pads are listened to", FULL, ""),
        ("no softmax", FULL, ".masked_fill(pad | pad.mT, -torch.inf)"),
        ("-10000 hides", "torch.finfo(torch.float32).min", "-1e4"),
        ("pads are open", "fill(pad,", "fill(~pad,"),
        ("triangle", "fill(pad,", "fill(pad | torch.ones(n, n).triu(1).bool(),"),
    ],
    "a2_audit": [
        ("never opened", "def audit(converted, original):\n    return True"),
        (
            "last bits differ",
            "torch.allclose(found[real.bool()], wanted[real.bool()], atol=1e-4)",
            "torch.equal(found, wanted)",
        ),
        ("in company", MASKS, 'verdict(influence(converted, ids)) == "bidirectional"'),
        ("try it alone", MASKS, f"{PADDED_ROW} and logits_are_right(beside)"),
        ("layer by layer", "range(converted.config.n_layer)", "[]", BOTH_LOGITS, "True"),
        ("Do you change pads", SEEN, "torch.equal(seen & wanted, wanted)", " and logits_are_right(beside)", ""),
        ("the same computation", BOTH_LOGITS, "True", "same_computation(original, converted, ids)", "True"),
        ("evaluation only", "(False, True)", "(False,)"),
        ("training only", "(False, True)", "(True,)"),
        ("keep them apart", HEADS, "verdict(layer.any(0)) for layer in heads", BOTH_LOGITS, "True"),
        ("look at every cell", HEADS, f"{ROWS_2_ON} for layer in heads for head in layer", BOTH_LOGITS, "True"),
        (
            "Is what you see full",
            *(HEADS, f"{ANY_FUTURE} for layer in heads for head in layer", BOTH_LOGITS, "True"),
            *(SEEN, "not (seen & ~wanted).any() and seen.triu(1).any()"),
            *("[verdict(influence(converted, ids))]", f"[{ANY_FUTURE} for head in [influence(converted, ids)]]"),
        ),
        ("ought the logits", BOTH_LOGITS, "True"),
        ("small differences pass", SEEN, "torch.equal(seen & wanted, wanted)"),
        ("must be undone", "converted.train(mode)", "pass"),
    ],
}
