"""Answers to A3. RIGHT: a correct one beside the solution. WRONG: words of the message, and what to change in the solution."""

RIGHT = {
    "a3_packed_loss": """
def packed_loss(logits, ids, documents):
    targets = torch.where(documents >= 0, ids, -100).roll(-1, 1)
    targets[documents != documents.roll(-1, 1)] = -100
    targets[:, -1] = -100
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten()).item()
""",
    "a3_proof": """
def proof_threshold(vocab_size, count, chance):
    return (count * math.log(vocab_size) + math.log(chance)) / count
""",
    "a3_document_leaks": """
def document_leaks(model, ids, documents, vocab_size):
    n = len(ids)
    rows = ids.repeat(n, vocab_size, 1)
    for j in range(n):
        rows[j, :, j] = torch.arange(vocab_size)
    rows = rows.flatten(0, 1)
    moved = model(rows, documents.expand_as(rows)).unflatten(0, (n, vocab_size)) != model(ids[None], documents[None])
    member = F.one_hot(documents)
    return (member.T @ moved.any(-1).any(1).T.long() @ member > 0) & ~torch.eye(member.shape[1]).bool()
""",
    "a3_infill": """
def infill(ids, spans, sentinels, end):
    inputs, moved, targets = ids.tolist(), [], []
    for (start, stop), sentinel in list(zip(spans, sentinels))[::-1]:
        hidden, inputs[start:stop] = inputs[start:stop], [sentinel]
        moved, targets = [sentinel, *hidden, *moved], [*hidden, end, *targets]
    return inputs + moved, [-100] * len(inputs) + targets
""",
    "a3_order_masks": """
def order_masks(order):
    content = torch.zeros(len(order), len(order), dtype=torch.bool)
    for k, i in enumerate(order):
        content[i, order[: k + 1]] = True
    return [content, content & ~torch.eye(len(order)).bool()]
""",
    "a3_word_perplexity": """
def word_perplexity(model, ids, words, mask_id):
    places = (words >= 0).nonzero()[:, 0]
    hide = (words[places, None] == words) & (torch.arange(len(ids)) >= places[:, None])
    logits = model(torch.where(hide, mask_id, ids))[torch.arange(len(places)), places]
    return F.cross_entropy(logits, ids[places]).exp()
""",
}

NEXT, COUNTED = "F.cross_entropy(logits[:, :-1][counted], targets[counted])", "(here == after) & (after >= 0)"
BY_ROW = "[F.cross_entropy(a[c], b[c]) for a, b, c in zip(logits[:, :-1], targets, counted)]"
LUCK, MOVED = "math.log(1 / chance)", "(model(changed[None], documents[None])[0] != base).any(-1)"
TABLE, LAST = "return table.fill_diagonal_(False)", "F.pad(documents[1:] != documents[:-1], (0, 1), value=True)"
SPAN, TARGETS = "[sentinel, *ids[start:stop]]", "[*ids[start:stop], end]"
TEXT, TAIL = "torch.tensor(text + moved)", "torch.tensor([-100] * len(text) + targets)"
RANK, HIDE = "rank[torch.tensor(order)] =", "(words == words[i]) & (torch.arange(len(ids)) >= i)"

WRONG = {
    "a3_packed_loss": [
        ("Did you shift?", COUNTED, "documents >= 0", "[:, :-1][counted]", "[counted]", "ids[:, 1:]", "ids"),
        ("the token before it", "ids[:, 1:]", "ids[:, :-1]", "logits[:, :-1]", "logits[:, 1:]"),
        ("shift twice", "ids[:, 1:]", "ids[:, 2:]", "[:, :-1]", "[:, :-2]", "documents[:, 1:]", "documents[:, 2:]"),
        ("across two documents", COUNTED, "(here >= 0) & (after >= 0)"),
        ("-1 equals -1", " & (after >= 0)", ""),
        ("counts all pairs", "[counted]", ".flatten(0, 1)"),
        ("mean of row means", NEXT, f"torch.stack({BY_ROW}).mean()"),
        ("is a sum", "targets[counted])", "targets[counted], reduction='sum')"),
        ("divided by all pairs", "targets[counted])", "targets[counted], reduction='sum') / counted.numel()"),
        ("in bits", "targets[counted])", "targets[counted]) / math.log(2)"),
        ("wrong sign", "return ", "return -"),
        ("Use log_softmax", NEXT, "F.nll_loss(logits[:, :-1][counted].softmax(-1).log(), targets[counted])"),
    ],
    "a3_proof": [
        ("threshold is ln V", f" - {LUCK} / count", ""),
        ("above ln V", f" - {LUCK}", f" + {LUCK}"),
        ("Divide it by count", " / count", ""),
        ("square root", "/ count", "/ count**0.5"),
        ("base 10", "math.log(1", "math.log10(1"),
        ("base 2", "math.log(vocab", "math.log2(vocab"),
        ("chance itself", LUCK, "chance"),
        ("cut off at 0", f"math.log(vocab_size) - {LUCK} / count", f"max(0.0, math.log(vocab_size) - {LUCK} / count)"),
    ],
    "a3_document_leaks": [
        ("is transposed", TABLE, f"{TABLE}.T"),
        ("True on the diagonal", TABLE, "return table"),
        ("fresh copy", "ids.clone()", "ids"),
        ("on earlier documents", TABLE, f"{TABLE}.tril()"),
        ("only neighbouring", TABLE, f"{TABLE}.tril(1).triu(-1)"),
        ("compare all logits", MOVED, f"{MOVED} & {LAST}"),
        ("a single token", "range(vocab_size)", "range(vocab_size - 1)"),
        ("with a tolerance", MOVED, "~torch.isclose(model(changed[None], documents[None])[0], base).all(-1)"),
    ],
    "a3_infill": [
        ("inputs first", f"{TEXT}, {TAIL}", f"{TAIL}, {TEXT}"),
        ("still contains the spans", "(text + moved)", "(ids + moved)"),
        ("has no sentinels", "[*ids[last:start], sentinel]", "ids[last:start]"),
        ("the whole span", "[*ids[last:start], sentinel]", "[*ids[last:start], *[sentinel] * (stop - start)]"),
        ("the same sentinel", "zip(spans, sentinels,", "zip(spans, sentinels[:1] * 9,"),
        ("no sentinel before them", SPAN, "ids[start:stop]"),
        (
            "The second span has moved",
            "text += [*ids[last:start], sentinel]",
            "text = text or ids.copy(); text[start:stop] = [sentinel]",
            "text += ids[last:]",
            "pass",
        ),
        ("`stop` is not included", SPAN, "[sentinel, *ids[start : stop + 1]]"),
        ("What is predicted?", "(text + moved)", "(text)"),
        ("stand at the tokens", TARGETS, "[-100, *ids[start:stop]]"),
        ("visible text too", "[-100] * len(text) + targets", "(text + moved)[1:] + [end]"),
        ("have no `end`", TARGETS, "[*ids[start:stop], -100]"),
        ("next sentinel", "+ targets)", "+ moved[1:] + [end])"),
        ("count sentinels", "[-100] * len(text) + targets", "[-100] * (len(text) - 1) + moved + [end]"),
    ],
    "a3_order_masks": [
        ("You need the rank", f"{RANK} torch.arange(len(order))", "rank[:] = torch.tensor(order)"),
        ("order is reversed", ">= rank", "<= rank", "> rank", "< rank"),
        ("ignore the order", RANK, "rank[:] ="),
        ("content first", "rank[:, None] >= rank, rank[:, None] > rank", "rank[:, None] > rank, rank[:, None] >= rank"),
        ("attends to its answer", "> rank", ">= rank"),
        ("closes too much", "> rank", "== rank + 1"),
        ("in the order of prediction", "return rank[:, None] >= rank", "return (rank[:, None] >= rank)[order]"),
    ],
    "a3_word_perplexity": [
        ("Nothing is hidden", "mask_id, ids", "ids, ids"),
        ("one token at a time", ">= i)", "== i)"),
        ("the whole word", " & (torch.arange(len(ids)) >= i)", ""),
        ("the earlier tokens of the word", ">= i)", "<= i)"),
        ("everything after", "(words == words[i]) & ", ""),
        ("all words at once", HIDE, "words >= 0"),
        ("equal tokens", HIDE, "ids == ids[i]"),
        ("as in MNTP", "[0, i]", "[0, i - 1]"),
        ("count special tokens", "words[i] >= 0", "True"),
        ("the mean cost", ".exp()", ""),
        ("the sum of the costs", ".mean()", ".sum()"),
        ("divide by all tokens", ".mean()", ".sum().div(len(ids))"),
        ("the number of words", ".mean()", ".sum().div(int(words.max()) + 1)"),
        ("Your base is 2", ".exp()", ".exp2()"),
        ("is the inverse", ".mean()", ".mean().neg()"),
        ("mean of perplexities", ".mean().exp()", ".exp().mean()"),
    ],
}
