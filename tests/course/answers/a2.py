"""Answers to A2. RIGHT: a correct one beside the solution. WRONG: words of the message, and what to change in the solution."""

RIGHT = {
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
def verdict(matrix):
    past, future = matrix[torch.ones_like(matrix).tril()], matrix[torch.ones_like(matrix).triu(1)]
    return ("bidirectional" if future.all() else "mixed" if future.any() else "causal") if past.all() else "mixed"
""",
    "a2_padding": """
def influence_in_batch(model, rows, real):
    before = model(input_ids=rows, attention_mask=real).logits.detach()
    seen = torch.zeros(*rows.shape, rows.shape[1], dtype=torch.bool)
    for r in range(len(rows)):
        for j in range(rows.shape[1]):
            for other in (11, 23):
                if other != rows[r, j]:
                    changed = rows.clone()
                    changed[r, j] = other
                    after = model(input_ids=changed, attention_mask=real).logits.detach()
                    seen[r, :, j] |= (after - before).abs().amax(-1)[r] > 0
        seen[r, real[r] == 0] = False
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
    "a2_difference": """
def first_difference(original, converted, ids):
    def states(model):
        found, stack = [], model.transformer
        hooks = [stack.h[0].register_forward_pre_hook(lambda _, args: found.append(args[0]))]
        hooks += [block.register_forward_hook(lambda _, args, output: found.append(output)) for block in stack.h]
        with torch.no_grad(), labkit.masked(model, masks.causal()):
            model(input_ids=ids)
        for hook in hooks:
            hook.remove()
        return torch.cat(found)

    differ = ((states(original) - states(converted)).abs() > 1e-4).flatten(1).any(1)
    return int(differ.int().argmax()) if differ.any() else None
""",
    "a2_packed": """
def packed_inputs(documents):
    batch, n = documents.shape
    mask, positions = torch.full((batch, 1, n, n), -torch.inf), torch.zeros(batch, n, dtype=torch.long)
    for b, row in enumerate(documents.tolist()):
        for number in set(row):
            here = [i for i in range(n) if row[i] == number]
            for place, i in enumerate(here):
                positions[b, i] = place
                mask[b, 0, i, here] = 0
    return mask, positions
""",
}

PILE_UP = """
def influence(model, ids):
    n, size = ids.shape[1], model.config.vocab_size
    seen, before, changed = torch.zeros(n, n).bool(), model(input_ids=ids).logits, ids.clone()
    for j in range(n):
        changed[0, j] = (ids[0, j] + 1) % size
        seen[:, j] = (model(input_ids=changed).logits != before).any(-1)[0]
    return seen
"""
ONE_BY_ONE = """
def influence_in_batch(model, rows, real):
    seen = []
    for ids, row in zip(rows, real):
        ids, mask = ids[None], row[None] if row.min() == 0 else None
        before, columns = model(input_ids=ids, attention_mask=mask).logits, []
        for j in range(ids.shape[1]):
            changed = ids.clone()
            changed[0, j] = (ids[0, j] + 1) % model.config.vocab_size
            columns.append((model(input_ids=changed, attention_mask=mask).logits != before).any(-1)[0])
        seen.append(torch.stack(columns, dim=-1) & row.bool()[:, None])
    return torch.stack(seen)
"""
WEIGHTS = """
def first_difference(original, converted, ids):
    ours, theirs = original.state_dict(), converted.state_dict()
    differ = [name for name in ours if not torch.equal(ours[name], theirs[name])]
    return None if not differ else 0 if "wpe" in differ[0] else 1
"""
LAST = (
    "for k, (a, b) in enumerate(zip(states, expected, strict=True))",
    "for k, (a, b) in reversed(list(enumerate(zip(states, expected))))",
)
ALLCLOSE, ADDED = "torch.allclose(a, b, atol=1e-4)", "masked_fill(~same, torch.finfo(torch.float32).min)"
CLOSE = "torch.allclose(logits, expected, atol=1e-4)"
EQUAL = "torch.equal(influence_in_batch(converted, rows, real), both_real)"
OPENS = """def opens(matrix, both_real):
    return bool(matrix.triu(1).any() and not (matrix & ~both_real).any())


def audit(converted, original):"""
BATCHES = "(test_rows[:1], test_real[:1]), (test_rows, test_real)"
LOGITS, HEADS, ONE = ", logits_are_right", "heads_are_open, ", 'verdict(head) == "bidirectional"'
NO_LOGITS = (LOGITS, ", lambda: first_difference(original, converted, test_rows[:1]) is None")
NO_PADDING = (EQUAL, "bool((influence_in_batch(converted, rows, real) | ~both_real).all())")
BOTH_MODES = "return in_both_modes(converted, [mask_is_full, heads_are_open, logits_are_right])"
ONE_MODE = """mode = converted.training
    converted.train({mode})
    right = mask_is_full() and heads_are_open() and logits_are_right()
    converted.train({after})
    return right"""

WRONG = {
    "a2_influence": [
        ("Rows and columns", "dim=1", "dim=0"),
        ("add up", PILE_UP),
        (
            "all logits, and exactly",
            "(logits(changed) != before).any(-1)",
            "logits(changed).argmax(-1) != before.argmax(-1)",
        ),
        ("diagonal is missing", "dim=1)", "dim=1) & ~torch.eye(ids.shape[1]).bool()"),
        ("Did you clone", "changed = ids.clone()", "changed = ids"),
        (
            "must be restored",
            "before, columns = logits(ids), []",
            "model.eval()\n    before, columns = logits(ids), []",
        ),
        ("end at vocab_size - 1", " % model.config.vocab_size", ""),
    ],
    "a2_verdict": [
        (
            "A single cell",
            "torch.equal(matrix, full)",
            "matrix.triu(1).any()",
            "torch.equal(matrix, full.tril())",
            "True",
        ),
        ("one corner", '"causal" if torch.equal(matrix, full.tril())', '"causal" if not matrix[0, -1]'),
        ("no earlier one either", "torch.equal(matrix, full.tril())", "not matrix.triu(1).any()"),
        ("symmetric", "torch.equal(matrix, full)", "torch.equal(matrix, matrix.T)"),
        ("but no earlier ones", "torch.equal(matrix, full)", "torch.equal(matrix | full.tril(), full)"),
    ],
    "a2_padding": [
        ("Did you pass the attention mask", ", attention_mask=real", ""),
        ("rows of padding", " & real.bool()[:, :, None]", ""),
        ("go through the model together", ONE_BY_ONE),
        ("replace its ids", ".any(-1))", ".any(-1) & real.bool()[:, j, None])"),
    ],
    "a2_heads": [
        (
            "through several layers",
            "def head_influence(model, ids, layer):\n    return influence(model, ids).expand(model.config.n_head, -1, -1)",
        ),
        ("cut in the wrong places", "view(n, heads, -1)", "view(n, -1, heads).transpose(1, 2)"),
        (
            "split the width only",
            *("view(n, heads, -1)", "view(heads, n, -1)"),
            *("dim=-1).transpose(0, 1)", "dim=-1)"),
        ),
        ("LayerNorm removes", "+= push", "+= 1e-7"),
        ("Rows and columns", "transpose(0, 1)", "permute(1, 2, 0)"),
        ("must be restored", "hook.remove()", "pass"),
    ],
    "a2_difference": [
        ("Only its mask is changed", "labkit.masked(converted, masks.causal())", "torch.no_grad()"),
        ("last bits differ", ALLCLOSE, "torch.equal(a, b)"),
        ("Do you compare the computation", WEIGHTS),
        ("compare all of them", ALLCLOSE, "bool((a - b).abs().mean() < 0.01)"),
        ("Which positions", ALLCLOSE, "torch.allclose(a[:, :3], b[:, :3], atol=1e-4)"),
        ("last state that differs", *LAST),
        ("Count from 0", "return k", "return k + 1"),
        ("is larger by 0.01", ALLCLOSE, "bool((a - b).abs().mean() < 1e-4)"),
        ("is smaller by 0.01", ALLCLOSE, "bool((a - b).max() < 1e-4)"),
    ],
    "a2_packed": [
        ("ignore the documents", "same.tril(-1).sum(-1)", "torch.arange(documents.shape[1]).expand_as(documents)"),
        ("left out of the count", "same.tril(-1).sum(-1)", "((documents > 0).cumsum(1) - 1).clamp(min=0)"),
        ("position 0, not 1", "tril(-1)", "tril()"),
        ("at least 0", "same.tril(-1).sum(-1)", "(same & (documents > 0)[:, None, :]).tril().sum(-1) - 1"),
        ("dtype of the scores", "torch.zeros(same.shape)", "torch.zeros(same.shape).double()"),
        ("True counts as 1", f"torch.zeros(same.shape).{ADDED}", "same"),
        ("Ones and zeros", f"torch.zeros(same.shape).{ADDED}", "same.float()"),
        ("attend to each other", "masked_fill(~same,", "masked_fill((documents == 0)[:, None, :],"),
        ("in no document", "masked_fill(~same,", "masked_fill(~same & (documents > 0)[:, None, :],"),
        ("no softmax", ADDED, "masked_fill(~(same & (documents > 0)[:, None, :]), -torch.inf)"),
        ("-10000", "torch.finfo(torch.float32).min", "-1e4"),
        ("others are open", "masked_fill(~same,", "masked_fill(same,"),
        ("still causal", "masked_fill(~same,", "masked_fill(~same.tril(),"),
    ],
    "a2_audit": [
        ("never converted", "def audit(converted, original):\n    return True"),
        ("pads left out", ".logits[real.bool()]", ".logits"),
        ("last bits differ", CLOSE, "torch.equal(logits, expected)"),
        ("test a padded batch", BATCHES, "(test_rows[:1], test_real[:1])"),
        ("test a row alone", BATCHES, "(test_rows, test_real)", HEADS, ""),
        ("layer by layer", HEADS, "", *NO_LOGITS),
        ("replace padding", *NO_PADDING, *NO_LOGITS),
        ("compare the computation", LOGITS, ""),
        ("evaluation only", BOTH_MODES, ONE_MODE.format(mode="False", after="mode")),
        ("training only", BOTH_MODES, ONE_MODE.format(mode="True", after="mode")),
        (
            "each head",
            ONE,
            "head[0, 1]",
            "for layer in layers for head in layer",
            "for head in map(sum, layers)",
            *NO_LOGITS,
        ),
        ("every cell", ONE, "head[2:].all()", *NO_LOGITS),
        (
            "a full matrix",
            *(ONE, "head.triu(1).any()", *NO_LOGITS),
            *(EQUAL, "opens(influence_in_batch(converted, rows, real), both_real)"),
            "def audit(converted, original):",
            OPENS,
        ),
        ("Which logits are right", *NO_LOGITS),
        ("small changes ignored", *NO_PADDING),
        ("must be restored", BOTH_MODES, ONE_MODE.format(mode="False", after="False")),
        ("test the heads", HEADS, ""),
    ],
}
