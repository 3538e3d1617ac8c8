"""Answers to A3. RIGHT: other correct ones. WRONG: misconceptions that run, each with words that its message must have."""


def _loss(logits, ids, counted, end="F.cross_entropy(named[counted], wanted[counted])"):
    return (
        "def next_token_loss(logits, ids, real):\n"
        f"    named, wanted, counted = logits{logits}, ids{ids}, real{counted}\n    return {end}"
    )


EACH = "F.cross_entropy(named.transpose(1, 2), wanted, reduction='none')"


def _table(put="other", moved="(model(changed[None])[0] != base).any(-1)", end="table.triu(1)", copy="ids.clone()"):
    return f"""
def leak_table(model, ids, vocab_size):
    n = len(ids)
    base = model(ids[None])[0]
    table = torch.zeros(n, n, dtype=torch.bool)
    for j in range(n):
        for other in range(vocab_size):
            changed = {copy}
            changed[j] = {put}
            table[:, j] |= {moved}
    return {end}
"""


def _corrupt(
    may="torch.isin(ids, ordinary)",
    chosen="(torch.rand(len(ids), generator=rng) < rate) & may",
    rescue="places[torch.randint(len(places), (), generator=rng)]",
    fate="torch.rand(len(ids), generator=rng)",
    masked="chosen & (fate < 0.8)",
    swapped="chosen & (fate >= 0.8) & (fate < 0.9)",
    randoms="ordinary[torch.randint(len(ordinary), (len(ids),), generator=rng)]",
    targets="torch.where(chosen, ids, -100)",
    results="inputs, {targets}",
):
    return f"""
def corrupt(ids, special, mask_id, vocab_size, rate, rng):
    ordinary = torch.tensor([i for i in range(vocab_size) if i not in special])
    may = {may}
    chosen = {chosen}
    places = may.nonzero()[:, 0]
    if len(places) and not chosen.any():
        chosen[{rescue}] = True
    fate = {fate}
    inputs = torch.where({masked}, mask_id, ids)
    swapped = {swapped}
    inputs = torch.where(swapped, {randoms}, inputs)
    return {results.format(targets=targets)}
"""


def _mntp(logits="logits[:, :-1]", targets="targets[:, 1:]", end="F.cross_entropy(named[counted], wanted[counted])"):
    return f"""
def mntp_loss(logits, targets):
    named, wanted = {logits}, {targets}
    counted = wanted != -100
    return {end} if counted.any() else torch.tensor(0.0)
"""


def _pseudo(
    hide="hidden[i] = mask_id",
    logits="model(hidden[None])[0, i]",
    skip="int(text[i]) in special",
    end="math.exp(sum(costs) / len(costs))",
    before="pass",
    copy="ids.clone()",
):
    return f"""
def pseudo_perplexity(model, ids, mask_id, special):
    costs, ordinary = [], ~torch.isin(ids, torch.tensor(special))
    ids, text = ids.clone(), ids
    {before}
    for i in range(len(ids)):
        if {skip}:
            continue
        hidden = {copy}
        {hide}
        costs.append(float(-{logits}.log_softmax(-1)[text[i]]))
    return {end}
"""


RIGHT = {
    "a3_next_token_loss": [
        """
def next_token_loss(logits, ids, real):
    costs = []
    for b in range(ids.shape[0]):
        for i in range(ids.shape[1] - 1):
            if real[b, i + 1]:
                costs.append(-logits[b, i].log_softmax(-1)[ids[b, i + 1]])
    return torch.stack(costs).mean().item()
""",
        _loss("[:, :-1]", "[:, 1:]", "[:, 1:]", f"({EACH} * counted).sum() / counted.sum()"),
        """
def next_token_loss(logits, ids, real):
    targets = torch.where(real, ids, -100).roll(-1, 1)
    targets[:, -1] = -100
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
""",
    ],
    "a3_proof": [
        "def proof_threshold(vocab_size, count, chance):\n"
        "    return (count * math.log(vocab_size) + math.log(chance)) / count",
        "def proof_threshold(vocab_size, count, chance):\n"
        "    return torch.tensor(float(vocab_size)).double().log() + torch.tensor(chance).double().log() / count",
    ],
    "a3_leak_table": [
        _table(),
        """
def leak_table(model, ids, vocab_size):
    n = len(ids)
    rows = ids.repeat(n, vocab_size, 1)
    for j in range(n):
        rows[j, :, j] = torch.arange(vocab_size)
    moved = model(rows.flatten(0, 1)).unflatten(0, (n, vocab_size)) != model(ids[None])
    return moved.any(-1).any(1).T.triu(1)
""",
    ],
    "a3_corrupt": [
        _corrupt(),
        """
def corrupt(ids, special, mask_id, vocab_size, rate, rng):
    def coin():
        return torch.rand((), generator=rng).item()
    def one_of(things):
        return things[int(torch.randint(len(things), (), generator=rng))]
    ordinary = [i for i in range(vocab_size) if i not in special]
    row = ids.tolist()
    places = [i for i in range(len(row)) if row[i] not in special]
    chosen = [i for i in places if coin() < rate] or ([one_of(places)] if places else [])
    inputs, targets = list(row), [-100] * len(row)
    for i in chosen:
        targets[i] = row[i]
        if coin() < 0.8:
            inputs[i] = mask_id
        elif coin() < 0.5:
            inputs[i] = one_of([each for each in ordinary if each != row[i]])
    return torch.tensor(inputs), torch.tensor(targets)
""",
    ],
    "a3_mntp_loss": [
        _mntp(),
        """
def mntp_loss(logits, targets):
    costs = []
    for b, i in (targets != -100).nonzero().tolist():
        if i > 0:
            costs.append(logits[b, i - 1].logsumexp(-1) - logits[b, i - 1, targets[b, i]])
    return sum(costs) / len(costs) if costs else 0.0
""",
        """
def mntp_loss(logits, targets):
    total = F.cross_entropy(logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten(), reduction="sum")
    return total / (targets[:, 1:] != -100).sum().clamp(min=1)
""",
    ],
    "a3_pseudo_perplexity": [
        _pseudo(),
        """
def pseudo_perplexity(model, ids, mask_id, special):
    places = torch.tensor([i for i, token in enumerate(ids.tolist()) if token not in special])
    rows = ids.repeat(len(places), 1)
    rows[torch.arange(len(places)), places] = mask_id
    logits = model(rows)[torch.arange(len(places)), places]
    return F.cross_entropy(logits, ids[places]).exp()
""",
    ],
}

WRONG = {
    "a3_next_token_loss": [
        ("Did you shift?", _loss("", "", "")),
        ("The last column is cut", _loss("[:, :-1]", "[:, :-1]", "[:, 1:]")),
        ("the token before them", _loss("[:, 1:]", "[:, :-1]", "[:, 1:]")),
        ("shift twice", _loss("[:, :-2]", "[:, 2:]", "[:, 2:]")),
        ("counts the pads", _loss("[:, :-1]", "[:, 1:]", "[:, 1:]", f"{EACH}.mean()")),
        ("asked for a pad", _loss("[:, :-1]", "[:, 1:]", "[:, :-1]")),
        (
            "mean of row means",
            _loss("[:, :-1]", "[:, 1:]", "[:, 1:]", f"(({EACH} * counted).sum(1) / counted.sum(1)).mean()"),
        ),
        ("is a sum", _loss("[:, :-1]", "[:, 1:]", "[:, 1:]", f"{EACH}[counted].sum()")),
        ("pads included", _loss("[:, :-1]", "[:, 1:]", "[:, 1:]", f"({EACH} * counted).mean()")),
        (
            "in bits",
            _loss("[:, :-1]", "[:, 1:]", "[:, 1:]", f"{EACH}[counted].mean() / math.log(2)"),
        ),
        (
            "Is there another way to it",
            _loss(
                "[:, :-1]",
                "[:, 1:]",
                "[:, 1:]",
                "-named.softmax(-1).log().gather(-1, wanted[..., None])[..., 0][counted].mean()",
            ),
        ),
    ],
    "a3_proof": [
        ("the floor itself", "def proof_threshold(v, count, chance):\n    return math.log(v)"),
        (
            "above the floor",
            "def proof_threshold(v, count, chance):\n    return math.log(v) - math.log(chance) / count",
        ),
        ("Did you divide", "def proof_threshold(v, count, chance):\n    return math.log(v) + math.log(chance)"),
        (
            "the root of count",
            "def proof_threshold(v, count, chance):\n    return math.log(v) + math.log(chance) / math.sqrt(count)",
        ),
        (
            "has base 10",
            "def proof_threshold(v, count, chance):\n    return math.log(v) + math.log10(chance) / count",
        ),
        (
            "floor is in bits",
            "def proof_threshold(v, count, chance):\n    return math.log2(v) + math.log(chance) / count",
        ),
        ("the chance itself", "def proof_threshold(v, count, chance):\n    return math.log(v) - chance / count"),
        (
            "cut off at 0",
            "def proof_threshold(v, count, chance):\n    return max(0.0, math.log(v) + math.log(chance) / count)",
        ),
    ],
    "a3_leak_table": [
        ("Row = the position that sees", _table(end="table.triu(1).T")),
        ("holds the past", _table(end="table | torch.ones(n, n).tril().bool()")),
        ("holds each token itself", _table(end="table.triu()")),
        ("everything is seen", _table(copy="ids", end="table.triu(1)")),
        ("misses leaks", _table(moved="model(changed[None])[0].argmax(-1) != base.argmax(-1)")),
        ("the next token alone", _table(end="table.triu(1).tril(1)")),
        ("of one word only", _table(put="(ids[j] + 1) % (vocab_size - 1)")),
        (
            "Did you leave a tolerance",
            _table(moved="~torch.isclose(model(changed[None])[0], base).all(-1)"),
        ),
    ],
    "a3_corrupt": [
        ("have changed places", _corrupt(results="{targets}, inputs")),
        ("count every position", _corrupt(targets="ids.clone()")),
        ("It says: do not count", _corrupt(targets="torch.where(chosen, -100, ids)")),
        ("take them out before", _corrupt(may="torch.ones(len(ids)).bool()")),
        ("overwritten first", _corrupt(targets="torch.where(chosen, inputs, -100)")),
        ("hit tokens that were not chosen", _corrupt(swapped="(fate >= 0.8) & (fate < 0.9) & may")),
        ("chosen tokens that stay", _corrupt(targets="torch.where(inputs != ids, ids, -100)")),
        ("all masked", _corrupt(masked="chosen", swapped="chosen & False")),
        (
            "what the masks left over",
            _corrupt(swapped="chosen & (fate >= 0.8) & (torch.rand(len(ids), generator=rng) < 0.1)"),
        ),
        ("becomes a random one", _corrupt(swapped="chosen & False")),
        ("stays as it was", _corrupt(swapped="chosen & (fate >= 0.8)")),
        ("changed places", _corrupt(masked="chosen & (fate < 0.1)", swapped="chosen & (fate >= 0.1) & (fate < 0.2)")),
        ("the whole vocabulary", _corrupt(randoms="torch.randint(vocab_size, (len(ids),), generator=rng)")),
        (
            "end of your range",
            _corrupt(randoms="ordinary[torch.randint(len(ordinary) - 1, (len(ids),), generator=rng)]"),
        ),
        (
            "a fixed number",
            _corrupt(
                chosen="torch.zeros(len(ids)).bool().index_fill(0, may.nonzero()[:, 0][torch.randperm(int(may.sum()), "
                "generator=rng)[: round(rate * int(may.sum()))]], True)"
            ),
        ),
        ("on the same side", _corrupt(rescue="places[:0]")),
        ("always the same", _corrupt(rescue="places[0]")),
        ("over generator=rng", _corrupt(chosen="(torch.rand(len(ids), generator=rng.manual_seed(0)) < rate) & may")),
        (
            "into the argument",
            "def corrupt(ids, special, mask_id, vocab_size, rate, rng):\n"
            "    chosen = (torch.rand(len(ids), generator=rng) < rate) & ~torch.isin(ids, torch.tensor(special))\n"
            "    targets = torch.where(chosen, ids, -100)\n    ids[chosen] = mask_id\n    return ids, targets",
        ),
    ],
    "a3_mntp_loss": [
        ("named where they stand", _mntp("logits", "targets")),
        ("the seat after", _mntp("logits[:, 1:]", "targets[:, :-1]")),
        ("from the last seat", _mntp("logits.roll(1, 1)", "targets")),
        ("counts as a token", _mntp(end="F.cross_entropy(named.transpose(1, 2), wanted.clamp(min=0))")),
        (
            "over all positions",
            _mntp(end="F.cross_entropy(named[counted], wanted[counted], reduction='sum') / targets.numel()"),
        ),
        (
            "all pairs of neighbours",
            _mntp(end="F.cross_entropy(named.transpose(1, 2), wanted, reduction='none').mean()"),
        ),
        ("is a sum", _mntp(end="F.cross_entropy(named[counted], wanted[counted], reduction='sum')")),
        (
            "mean of row means",
            _mntp(
                end="(F.cross_entropy(named.transpose(1, 2), wanted, reduction='none').sum(1) / counted.sum(1)).mean()"
            ),
        ),
        (
            "divides by all targets",
            _mntp(end="F.cross_entropy(named[counted], wanted[counted], reduction='sum') / (targets != -100).sum()"),
        ),
        (
            "divides 0 by 0",
            "def mntp_loss(logits, targets):\n"
            "    return F.cross_entropy(logits[:, :-1].transpose(1, 2), targets[:, 1:])",
        ),
    ],
    "a3_pseudo_perplexity": [
        ("nothing was hidden", _pseudo(hide="pass")),
        ("pile up", _pseudo(copy="ids")),
        ("all hidden at once", _pseudo(before="ids[ordinary] = mask_id")),
        ("nothing after the hidden word", _pseudo(hide="hidden[i:] = mask_id")),
        ("as in MNTP", _pseudo(logits="model(hidden[None])[0, max(i - 1, 0)]")),
        ("counts special tokens", _pseudo(skip="False")),
        ("wherever it occurs", _pseudo(hide="hidden[ids == ids[i]] = mask_id")),
        ("mean in nats", _pseudo(end="sum(costs) / len(costs)")),
        ("exponent is a sum", _pseudo(end="math.exp(sum(costs))")),
        ("divided by all tokens", _pseudo(end="math.exp(sum(costs) / len(ids))")),
        ("Your base is 2", _pseudo(end="2 ** (sum(costs) / len(costs))")),
        ("one over it", _pseudo(end="math.exp(-sum(costs) / len(costs))")),
        ("mean of perplexities", _pseudo(end="sum(map(math.exp, costs)) / len(costs)")),
    ],
}
