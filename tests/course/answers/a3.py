"""Answers to A3. RIGHT: a correct one beside the solution. WRONG: words of the message, and what to change in the solution."""

RIGHT = {
    "a3_next_token_loss": """
def next_token_loss(logits, ids, real):
    targets = torch.where(real, ids, -100).roll(-1, 1)
    targets[:, -1] = -100
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten()).item()
""",
    "a3_proof": """
def proof_threshold(vocab_size, count, chance):
    return (count * math.log(vocab_size) + math.log(chance)) / count
""",
    "a3_leak_table": """
def leak_table(model, ids, vocab_size):
    n = len(ids)
    rows = ids.repeat(n, vocab_size, 1)
    for j in range(n):
        rows[j, :, j] = torch.arange(vocab_size)
    moved = model(rows.flatten(0, 1)).unflatten(0, (n, vocab_size)) != model(ids[None])
    return moved.any(-1).any(1).T.triu(1)
""",
    "a3_corrupt": """
def corrupt(ids, special, mask_id, vocab_size, rate, rng):
    coins, fates = (torch.rand(len(ids), generator=rng).tolist() for _ in range(2))
    ordinary = [i for i in range(vocab_size) if i not in special]
    inputs, targets = ids.tolist(), [-100] * len(ids)
    places = [i for i, token in enumerate(inputs) if token not in special]
    chosen = [i for i in places if coins[i] < rate]
    if places and not chosen:
        chosen = [places[int(torch.randint(len(places), (), generator=rng))]]
    for i in chosen:
        targets[i] = inputs[i]
        if fates[i] < 0.8:
            inputs[i] = mask_id
        elif fates[i] < 0.9:
            inputs[i] = ordinary[int(torch.randint(len(ordinary), (), generator=rng))]
    return torch.tensor(inputs), torch.tensor(targets)
""",
    "a3_mntp_loss": """
def mntp_loss(logits, targets):
    costs = []
    for b, i in (targets != -100).nonzero().tolist():
        if i > 0:
            costs.append(logits[b, i - 1].logsumexp(-1) - logits[b, i - 1, targets[b, i]])
    return sum(costs) / len(costs) if costs else 0.0
""",
    "a3_pseudo_perplexity": """
def pseudo_perplexity(model, ids, mask_id, special):
    places = torch.tensor([i for i, token in enumerate(ids.tolist()) if token not in special])
    rows = ids.repeat(len(places), 1)
    rows[torch.arange(len(places)), places] = mask_id
    logits = model(rows)[torch.arange(len(places)), places]
    return F.cross_entropy(logits, ids[places]).exp()
""",
}

NEXT = "F.cross_entropy(logits[:, :-1][counted], named[counted])"
BY_ROW = "[F.cross_entropy(a[c], b[c]) for a, b, c in zip(logits[:, :-1], named, counted)]"
SHARE, MOVED = "math.log(1 / chance)", "(model(changed[None])[0] != base).any(-1)"
TARGETS, SWAPPED = "torch.where(chosen, ids, -100)", "chosen & (fate >= 0.8) & (fate < 0.9)"
RANDOMS = "ordinary[torch.randint(len(ordinary), (len(ids),), generator=rng)]"
COINS = "torch.rand(len(ids), generator=rng) < rate"

WRONG = {
    "a3_next_token_loss": [
        ("Did you shift?", "[:, 1:]", "", "[:, :-1]", ""),
        ("You cut the last column", "ids[:, 1:]", "ids[:, :-1]"),
        ("the token before it", "ids[:, 1:]", "ids[:, :-1]", "logits[:, :-1]", "logits[:, 1:]"),
        ("shift twice", "[:, 1:]", "[:, 2:]", "[:, :-1]", "[:, :-2]"),
        ("counts the pads", "[counted]", ".flatten(0, 1)"),
        ("asked for a pad", "real[:, 1:]", "real[:, :-1]"),
        ("mean of row means", NEXT, f"torch.stack({BY_ROW}).mean()"),
        ("is a sum", "named[counted])", "named[counted], reduction='sum')"),
        ("pads included", "named[counted])", "named[counted], reduction='sum') / counted.numel()"),
        ("in bits", "named[counted])", "named[counted]) / math.log(2)"),
        ("wrong sign", "return ", "return -"),
        ("Is there another way to it", NEXT, "F.nll_loss(logits[:, :-1][counted].softmax(-1).log(), named[counted])"),
    ],
    "a3_proof": [
        ("the floor itself", f" - {SHARE} / count", ""),
        ("above the floor", f" - {SHARE}", f" + {SHARE}"),
        ("Did you divide", " / count", ""),
        ("the root of count", "/ count", "/ count**0.5"),
        ("has base 10", "math.log(1", "math.log10(1"),
        ("floor is in bits", "math.log(vocab", "math.log2(vocab"),
        ("the chance itself", SHARE, "chance"),
        (
            "cut off at 0",
            f"math.log(vocab_size) - {SHARE} / count",
            f"max(0.0, math.log(vocab_size) - {SHARE} / count)",
        ),
    ],
    "a3_leak_table": [
        ("Row = the position that sees", "return table", "return table.T"),
        ("holds the past", "return table", "return table | torch.ones(n, n).tril().bool()"),
        ("holds each token itself", "[:j", "[: j + 1"),
        ("Everything is seen", "ids.clone()", "ids"),
        ("misses leaks", MOVED, "model(changed[None])[0].argmax(-1) != base.argmax(-1)"),
        ("the next token alone", "return table", "return table.tril(1)"),
        ("of one word only", "range(vocab_size)", "range(vocab_size - 1)"),
        ("Did you leave a tolerance", MOVED, "~torch.isclose(model(changed[None])[0], base).all(-1)"),
    ],
    "a3_corrupt": [
        ("Your two results", "return inputs, targets", "return targets, inputs"),
        ("count every position", TARGETS, "ids.clone()"),
        ("It means: do not count", TARGETS, "torch.where(chosen, -100, ids)"),
        ("take them out before", " & may", ""),
        ("overwritten first", "return inputs, targets", "return inputs, torch.where(chosen, inputs, -100)"),
        ("hit tokens that were not chosen", SWAPPED, "may & (fate >= 0.8) & (fate < 0.9)"),
        ("chosen tokens that stay", "return inputs, targets", "return inputs, torch.where(inputs != ids, ids, -100)"),
        ("All chosen tokens are masked", "(fate < 0.8)", "(fate < 2)", "(fate >= 0.8)", "(fate >= 2)"),
        ("what the masks left over", "(fate < 0.9)", "(fate < 0.82)"),
        ("becomes a random one", "(fate < 0.9)", "(fate < 0.8)"),
        ("stays as it was", "(fate < 0.9)", "(fate < 2)"),
        ("Your shares have changed", "(fate < 0.8)", "(fate < 0.1)", "(fate >= 0.8)", "(fate >= 0.1)", "0.9", "0.2"),
        ("the whole vocabulary", RANDOMS, RANDOMS[9:-1].replace("len(ordinary)", "vocab_size")),
        ("end of your range", "torch.randint(len(ordinary)", "torch.randint(len(ordinary) - 1"),
        (
            "a fixed number",
            *(f"({COINS}) & may", "may & (order < round(rate * int(may.sum())))"),
            *(
                "    chosen =",
                "    order = (torch.rand(len(ids), generator=rng) + ~may).argsort().argsort()\n    chosen =",
            ),
        ),
        ("on the same side", "if may.any()", "if False"),
        ("always the same", "places[torch.randint(len(places), (), generator=rng)]", "places[0]"),
        ("over generator=rng", COINS, "torch.rand(len(ids), generator=rng.manual_seed(0)) < rate"),
        (
            "into the argument",
            "inputs = torch.where(chosen & (fate < 0.8), mask_id, ids)",
            "inputs = ids.fill_(mask_id)",
        ),
    ],
    "a3_mntp_loss": [
        ("named where they stand", "[:, 1:]", "", "[:, :-1]", ""),
        ("the seat after", "targets[:, 1:]", "targets[:, :-1]", "logits[:, :-1]", "logits[:, 1:]"),
        ("from the last seat", "targets[:, 1:]", "targets", "logits[:, :-1]", "logits.roll(1, 1)"),
        ("counts as a token", "targets[:, 1:]", "targets[:, 1:].clamp(min=0)"),
        ("over all positions", "named[counted])", "named[counted], reduction='sum') / targets.numel()"),
        ("all pairs of neighbours", "named[counted])", "named[counted], reduction='sum') / named.numel()"),
        ("is a sum", "named[counted])", "named[counted], reduction='sum')"),
        ("mean of row means", NEXT, f"torch.stack({BY_ROW}).mean()"),
        ("divides by all targets", "named[counted])", "named[counted], reduction='sum') / (targets != -100).sum()"),
        ("wrong sign", "return F", "return -F"),
        ("divides 0 by 0", "if not counted.any()", "if False"),
    ],
    "a3_pseudo_perplexity": [
        ("nothing was hidden", "hidden[i] = mask_id", "pass"),
        ("pile up", "hidden = ids.clone()", "pass", "costs = []", "costs, hidden = [], ids.clone()"),
        ("all hidden at once", "hidden[i] =", "hidden[~torch.isin(ids, torch.tensor(special))] ="),
        ("nothing after the hidden word", "hidden[i] =", "hidden[i:] ="),
        ("as in MNTP", "[0, i]", "[0, i - 1]"),
        ("counts special tokens", "int(ids[i]) not in special", "True"),
        ("wherever it occurs", "hidden[i] =", "hidden[ids == ids[i]] ="),
        ("mean in nats", ".exp()", ""),
        ("exponent is a sum", ".mean()", ".sum()"),
        ("divided by all tokens", ".mean()", ".sum().div(len(ids))"),
        ("Your base is 2", ".exp()", ".exp2()"),
        ("one over it", ".mean()", ".mean().neg()"),
        ("mean of perplexities", ".mean().exp()", ".exp().mean()"),
    ],
}
