"""Answers to A2. RIGHT: other correct ones. WRONG: misconceptions that run, each with words that its message must have."""

PAIR = """
    n, vocabulary = ids.shape[1], model.config.vocab_size
    rows, real = ids.repeat(2, 1), torch.ones(2, n, dtype=torch.long)
    rows[1, n - pads :], real[1, n - pads :] = 0, 0
    seen = torch.zeros(2, n, n, dtype=torch.bool)
"""
PADDED = (
    f"def influence_padded(model, ids, pads):{PAIR}"
    """
    with torch.no_grad():
        before = model(input_ids=rows, attention_mask=real).logits
        for j in range(n):
            for step in (1, 7, 29):
                changed = rows.clone()
                changed[:, j] = (rows[:, j] + step) % vocabulary
                seen[:, :, j] |= (model(input_ids=changed, attention_mask=real).logits != before).any(-1)
    return seen & real.bool()[:, :, None]
"""
)
HEADS = """
def head_influence(model, ids, layer):
    block, n, heads = model.transformer.h[layer], ids.shape[1], model.config.n_head
    push = torch.randn(model.config.n_embd, generator=torch.Generator().manual_seed(1))

    @torch.no_grad()
    def by_head(j=None):
        found = []

        def change(_, args):
            hidden = args[0].clone()
            if j is not None:
                hidden[:, j] += push
            return (hidden, *args[1:])

        one = block.register_forward_pre_hook(change)
        two = block.attn.c_proj.register_forward_pre_hook(lambda _, args: found.append(args[0]))
        model(input_ids=ids)
        one.remove()
        two.remove()
        return found[0][0].view(n, heads, -1)

    before = by_head()
    return torch.stack([(by_head(j) != before).any(-1) for j in range(n)], dim=-1).transpose(0, 1)
"""
SAME = """
def same_computation(original, converted, ids):
    with torch.no_grad(), labkit.masked(converted, masks.causal()):
        wanted, found = original(input_ids=ids).logits, converted(input_ids=ids).logits
    return torch.allclose(found, wanted, atol=1e-4)
"""
AUDIT = """
def audit(converted, original):
    ids, pads = torch.arange(30, 37)[None], 3
    alone, beside = torch.ones(1, 7, dtype=torch.long), torch.ones(2, 7, dtype=torch.long)
    beside[1, 4:] = 0
    mode = converted.training

    def logits_are_right(real):
        rows = ids.repeat(len(real), 1)
        with torch.no_grad():
            wanted = original(input_ids=rows, attention_mask=full_mask(real)).logits
            found = converted(input_ids=rows, attention_mask=real).logits
        return torch.allclose(found[real.bool()], wanted[real.bool()], atol=1e-4)

    def looks_right():
        if verdict(influence(converted, ids)) != "bidirectional":
            return False
        seen = influence_padded(converted, ids, pads)
        if verdict(seen[0]) != "bidirectional" or verdict(seen[1, :4, :4]) != "bidirectional":
            return False
        if seen[1, :4, 4:].any():
            return False
        for layer in range(converted.config.n_layer):
            heads = head_influence(converted, ids, layer)
            if any(verdict(head) != "bidirectional" for head in heads):
                return False
        return logits_are_right(alone) and logits_are_right(beside)

    for training in (False, True):
        converted.train(training)
        fine = looks_right()
        converted.train(mode)
        if not fine:
            return False
    return same_computation(original, converted, ids)
"""


def _without(source, *changes):
    """The source with each (old, new) put in; an old that is not there is an error."""
    for old, new in changes:
        if old not in source:
            raise ValueError(f"not there: {old!r}")
        source = source.replace(old, new)
    return source


RIGHT = {
    "a2_noticed": [
        """
def who_notices(model, ids, j, other):
    both = ids.repeat(2, 1)
    both[1, j] = other
    logits = model(input_ids=both).logits.detach()
    return (logits[0] - logits[1]).abs().amax(-1) > 0
""",
        """
def who_notices(model, ids, j, other):
    before = model(input_ids=ids).logits[0].tolist()
    changed = torch.tensor([[other if i == j else int(t) for i, t in enumerate(ids[0])]])
    after = model(input_ids=changed).logits[0].tolist()
    return torch.tensor([a != b for a, b in zip(before, after)])
""",
    ],
    "a2_influence": [
        """
def influence(model, ids):
    n, size = ids.shape[1], model.config.vocab_size
    columns = []
    for j in range(n):
        others = torch.tensor([t for t in range(5) if t != ids[0, j]][:4])
        rows = ids.repeat(5, 1)
        rows[1:, j] = others
        logits = model(input_ids=rows).logits.detach()
        columns.append((logits[1:] != logits[:1]).any(-1).any(0))
    return torch.stack(columns, dim=1)
""",
    ],
    "a2_verdict": [
        """
def verdict(seen):
    n = len(seen)
    past = all(bool(seen[i, j]) for i in range(n) for j in range(i + 1))
    future = [bool(seen[i, j]) for i in range(n) for j in range(i + 1, n)]
    if past and all(future):
        return "bidirectional"
    return "causal" if past and not any(future) else "mixed"
""",
        """
def verdict(seen):
    past, future = seen[torch.ones_like(seen).tril()], seen[torch.ones_like(seen).triu(1)]
    return ("bidirectional" if future.all() else "mixed" if future.any() else "causal") if past.all() else "mixed"
""",
    ],
    "a2_padding": [
        """
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
    ],
    "a2_heads": [
        """
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
    ],
    "a2_same": [
        """
def same_computation(original, converted, ids):
    with torch.no_grad(), labkit.masked(original, masks.bidirectional()), labkit.masked(converted, masks.bidirectional()):
        return bool((original(input_ids=ids).logits - converted(input_ids=ids).logits).abs().max() < 1e-4)
""",
        SAME,
    ],
    "a2_full_mask": [
        """
def full_mask(attention_mask):
    batch, n = attention_mask.shape
    mask = torch.zeros(batch, 1, n, n)
    for b in range(batch):
        for key in range(n):
            if attention_mask[b, key] == 0:
                mask[b, 0, :, key] = float("-inf")
    return mask
""",
        """
def full_mask(attention_mask):
    n = attention_mask.shape[1]
    lowest = torch.finfo(torch.float32).min
    return ((1 - attention_mask[:, None, None, :].float()) * lowest).repeat(1, 1, n, 1)
""",
    ],
    "a2_audit": [AUDIT],
}

WRONG = {
    "a2_noticed": [
        (
            "writes into ids",
            "def who_notices(model, ids, j, other):\n    before = model(input_ids=ids).logits.clone()\n    ids[0, j] = other\n"
            "    return (model(input_ids=ids).logits != before).any(-1)[0]",
        ),
        (
            "written into ids",
            "def who_notices(model, ids, j, other):\n    changed = ids\n    changed[0, j] = other\n"
            "    return (model(input_ids=ids).logits != model(input_ids=changed).logits).any(-1)[0]",
        ),
        (
            "best guess",
            "def who_notices(model, ids, j, other):\n    changed = ids.clone()\n    changed[0, j] = other\n"
            "    return (model(input_ids=ids).logits.argmax(-1) != model(input_ids=changed).logits.argmax(-1))[0]",
        ),
        (
            "Was another one changed",
            "def who_notices(model, ids, j, other):\n    changed = ids.clone()\n    changed[0, j] = other\n"
            "    seen = (model(input_ids=ids).logits != model(input_ids=changed).logits).any(-1)[0]\n"
            "    seen[j] = False\n    return seen",
        ),
        (
            "shape",
            "def who_notices(model, ids, j, other):\n    changed = ids.clone()\n    changed[0, j] = other\n"
            "    return (model(input_ids=ids).logits != model(input_ids=changed).logits).any(-1)",
        ),
    ],
    "a2_influence": [
        (
            "Rows and columns",
            "def influence(model, ids):\n    rows = [who_notices(model, ids, j, 3) | who_notices(model, ids, j, 4)"
            " | who_notices(model, ids, j, 5) for j in range(ids.shape[1])]\n    return torch.stack(rows)",
        ),
        (
            "pile up",
            "def influence(model, ids):\n    n, changed = ids.shape[1], ids.clone()\n"
            "    seen, before = torch.zeros(n, n).bool(), model(input_ids=ids).logits\n    for j in range(n):\n"
            "        changed[0, j] = (changed[0, j] + 7) % model.config.vocab_size\n"
            "        seen[:, j] = (model(input_ids=changed).logits != before).any(-1)[0]\n    return seen",
        ),
        (
            "twins",
            "def influence(model, ids):\n    size = model.config.vocab_size\n    columns = "
            "[who_notices(model, ids, j, (ids[0, j] + 1) % size) for j in range(ids.shape[1])]\n"
            "    return torch.stack(columns, 1)",
        ),
        (
            "small differences",
            "def influence(model, ids):\n    n, size = ids.shape[1], model.config.vocab_size\n"
            "    seen, before = torch.zeros(n, n).bool(), model(input_ids=ids).logits\n    for j in range(n):\n"
            "        for step in (1, 7, 29):\n            changed = ids.clone()\n"
            "            changed[0, j] = (ids[0, j] + step) % size\n"
            "            seen[:, j] |= ((model(input_ids=changed).logits - before).abs() > 1e-2).any(-1)[0]\n    return seen",
        ),
        (
            "diagonal is missing",
            "def influence(model, ids):\n    n = ids.shape[1]\n    columns = [who_notices(model, ids, j, 3) for j in range(n)]\n"
            "    return torch.stack(columns, 1) & ~torch.eye(n).bool()",
        ),
    ],
    "a2_verdict": [
        (
            "A single cell",
            "def verdict(seen):\n    return 'bidirectional' if seen.triu(1).any() else 'causal'",
        ),
        (
            "one corner",
            "def verdict(seen):\n    future = seen[torch.ones_like(seen).triu(1)]\n    if future.all():\n"
            "        return 'bidirectional'\n    return 'mixed' if seen[0, -1] else 'causal'",
        ),
        (
            "reads no text",
            "def verdict(seen):\n    if seen.all():\n        return 'bidirectional'\n"
            "    return 'mixed' if seen.triu(1).any() else 'causal'",
        ),
        (
            "Symmetric",
            "def verdict(seen):\n    if torch.equal(seen, seen.T):\n        return 'bidirectional'\n"
            "    return 'causal' if torch.equal(seen, torch.ones_like(seen).tril()) else 'mixed'",
        ),
        (
            "nobody what came before",
            "def verdict(seen):\n    future = seen[torch.ones_like(seen).triu(1)]\n    if future.all():\n"
            "        return 'bidirectional'\n"
            "    return 'causal' if torch.equal(seen, torch.ones_like(seen).tril()) else 'mixed'",
        ),
    ],
    "a2_padding": [
        ("Did the mask go along", _without(PADDED, (", attention_mask=real", ""))),
        ("outputs of pads", _without(PADDED, (" & real.bool()[:, :, None]", ""))),
        (
            "run alone",
            _without(PADDED, ("    return seen", "    seen[0] = influence(model, ids)\n    return seen")),
        ),
        (
            "in a pad's place",
            _without(PADDED, ("    return seen", "    seen[1, :, n - pads :] = False\n    return seen")),
        ),
    ],
    "a2_heads": [
        (
            "gathered in several layers",
            "def head_influence(model, ids, layer):\n    return influence(model, ids).expand(model.config.n_head, -1, -1)",
        ),
        (
            "cut in the wrong places",
            _without(HEADS, (".view(n, heads, -1)", ".view(n, -1, heads).transpose(1, 2)")),
        ),
        ("LayerNorm takes away", _without(HEADS, ("hidden[:, j] += push", "hidden[:, j] += 1e-7"))),
        ("Rows and columns", _without(HEADS, (".transpose(0, 1)\n", ".permute(1, 2, 0)\n"))),
        ("must be undone", _without(HEADS, ("        two.remove()\n", ""), ("found[0][0]", "found[-1][0]"))),
    ],
    "a2_same": [
        ("Which one is in force", _without(SAME, (", labkit.masked(converted, masks.causal())", ""))),
        (
            "How equal must they be",
            _without(SAME, ("torch.allclose(found, wanted, atol=1e-4)", "torch.equal(found, wanted)")),
        ),
        (
            "what it does with them",
            "def same_computation(original, converted, ids):\n    ours, theirs = original.state_dict(), converted.state_dict()\n"
            "    return all(torch.equal(ours[name], theirs[name]) for name in ours)",
        ),
        (
            "best guesses",
            _without(
                SAME,
                ("torch.allclose(found, wanted, atol=1e-4)", "bool((found - wanted).abs().mean() < 0.05)"),
            ),
        ),
        ("late in the sentence", _without(SAME, ("(found, wanted,", "(found[:, :3], wanted[:, :3],"))),
    ],
    "a2_full_mask": [
        (
            "True counts as 1",
            "def full_mask(attention_mask):\n    n = attention_mask.shape[1]\n"
            "    return attention_mask.bool()[:, None, None, :].repeat(1, 1, n, 1)",
        ),
        (
            "Ones and zeros",
            "def full_mask(attention_mask):\n    n = attention_mask.shape[1]\n"
            "    return attention_mask[:, None, None, :].float().repeat(1, 1, n, 1)",
        ),
        (
            "Pads are listened to",
            "def full_mask(attention_mask):\n    b, n = attention_mask.shape\n    return torch.zeros(b, 1, n, n)",
        ),
        (
            "no softmax",
            "def full_mask(attention_mask):\n    real = attention_mask.bool()\n"
            "    pair = real[:, None, :, None] & real[:, None, None, :]\n"
            "    return torch.zeros(pair.shape).masked_fill(~pair, float('-inf'))",
        ),
        (
            "-10000 hides",
            "def full_mask(attention_mask):\n    n = attention_mask.shape[1]\n"
            "    return ((1 - attention_mask[:, None, None, :].float()) * -1e4).repeat(1, 1, n, 1)",
        ),
        (
            "pads are open",
            "def full_mask(attention_mask):\n    b, n = attention_mask.shape\n"
            "    real = attention_mask.bool()[:, None, None, :].expand(b, 1, n, n)\n"
            "    return torch.zeros(b, 1, n, n).masked_fill(real, torch.finfo(torch.float32).min)",
        ),
        (
            "triangle",
            "def full_mask(attention_mask):\n    b, n = attention_mask.shape\n"
            "    real = attention_mask.bool()[:, None, None, :] & torch.ones(n, n).tril().bool()\n"
            "    return torch.zeros(b, 1, n, n).masked_fill(~real, torch.finfo(torch.float32).min)",
        ),
    ],
    "a2_audit": [
        ("never opened", "def audit(converted, original):\n    return True"),
        (
            "last bits differ",
            _without(
                AUDIT,
                (
                    "torch.allclose(found[real.bool()], wanted[real.bool()], atol=1e-4)",
                    "torch.equal(found[real.bool()], wanted[real.bool()])",
                ),
            ),
        ),
        (
            "in company",
            "def audit(converted, original):\n    ids = torch.arange(30, 37)[None]\n"
            "    if verdict(influence(converted, ids)) != 'bidirectional':\n        return False\n"
            "    return same_computation(original, converted, ids)",
        ),
        (
            "layer by layer",
            _without(
                AUDIT,
                ("range(converted.config.n_layer)", "[]"),
                ("logits_are_right(alone) and logits_are_right(beside)", "True"),
            ),
        ),
        (
            "Do you change pads",
            _without(AUDIT, ("seen[1, :4, 4:].any()", "False"), (" and logits_are_right(beside)", "")),
        ),
        (
            "same computation",
            _without(
                AUDIT,
                ("logits_are_right(alone) and logits_are_right(beside)", "True"),
                ("return same_computation(original, converted, ids)", "return True"),
            ),
        ),
        ("evaluation only", _without(AUDIT, ("(False, True):", "(False,):"))),
        ("training only", _without(AUDIT, ("(False, True):", "(True,):"))),
        (
            "keep them apart",
            _without(
                AUDIT,
                (
                    'verdict(head) != "bidirectional" for head in heads',
                    "verdict(heads.any(0)) != 'bidirectional' for _ in [0]",
                ),
                ("return logits_are_right(alone) and logits_are_right(beside)", "return True"),
            ),
        ),
        ("ought the logits", _without(AUDIT, ("logits_are_right(alone) and logits_are_right(beside)", "True"))),
        (
            "small differences pass",
            _without(AUDIT, ("seen[1, :4, 4:].any()", "False")),
        ),
        ("must be undone", _without(AUDIT, ("        converted.train(mode)\n", ""))),
    ],
}
