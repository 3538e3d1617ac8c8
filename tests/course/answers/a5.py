"""Answers to A5. RIGHT: a correct one beside the solution. WRONG: words of the message, and what to change in the solution."""


def _mask(cells):
    """A segment_mask by a rule over groups g (0: prefix, 1..: segments, last: tail); i, j are the query's and key's."""
    return f"""
def segment_mask(prefix, lengths, tail):
    g = [0] * prefix + [s for s, n in enumerate(lengths, 1) for _ in range(n)] + [len(lengths) + 1] * tail
    last, n = len(lengths) + 1, len(g)
    return torch.tensor([[{cells} for j in range(n)] for i in range(n)])
"""


def _is_sound(*tests, segments="[[11, 7], [30, 8, 22, 9], [17, 6, 25]]", new="[39]", near="1e-9"):
    return f"""
def is_sound(engine, model):
    prefix, cue, segments = [1, 2, 3], [4, 5], {segments}

    def same(one, other):
        return bool((one - other).abs().max() <= {near})

    def plain(segment):
        return model(torch.tensor([prefix + segment + cue]))[0, -1]

    def fused(*segments):
        return engine(prefix, list(segments), cue)

    (one, two, three), new = segments, {new}
    return {" and ".join(tests) or "True"}
"""


ONE = "all(same(fused(each), plain(each)) for each in segments)"
COPIES = "all(same(fused(*[each] * 5), plain(each)) for each in segments)"
ORDER = "same(fused(*segments), fused(*segments[::-1])) and same(fused(*segments), fused(two, three, one))"
MATTERS = "not any(same(fused(*segments), fused(*rest, new)) for rest in ((one, two), (one, three), (two, three)))"


def _is_causal(body, ids="torch.randint(40, (4, 30), generator=torch.Generator().manual_seed(1))", near="1e-9"):
    return f"""
def is_causal(model):
    ids = {ids}
    before = model(ids)

    def moved(now, place):
        return bool((now[:, :place] - before[:, :place]).abs().max() > {near})

    def changed(place, by=7):
        other = ids.clone()
        other[:, place] = (other[:, place] + by) % 40
        return model(other)

    places = range(1, ids.shape[1])
    return {body}
"""


TOKENS = "not any(moved(changed(i, by), i) for i in places for by in range(1, 5))"
CUT = "not any(moved(model(ids[:, :i]), i) for i in places)"

RIGHT = {
    "a5_segment_mask": _mask("j <= i and (g[i] == g[j] or g[j] == 0 or g[i] == last)"),
    "a5_merge": """
def merged(first, second):
    (one, a), (two, b) = first, second
    lse = torch.logsumexp(torch.stack([a, b]), dim=0)
    x, y = ((each - lse).exp().nan_to_num(0.0)[..., None] for each in (a, b))
    return [x * one + y * two, lse]
""",
    "a5_positions": """
def positions(prefix, lengths, tail):
    places = [*range(prefix), *(i for length in lengths for i in range(prefix, prefix + length))]
    for _ in range(tail):
        places.append(max(places) + 1)
    return places
""",
    "a5_key_bias": """
def key_bias(prefix, lengths, tail, weights=None):
    weights = torch.ones(len(lengths)) if weights is None else torch.tensor(weights)
    each = (weights / weights.sum()).log().repeat_interleave(torch.tensor(lengths))
    return torch.nn.functional.pad(each, (prefix, tail))
""",
    "a5_two_ways": """
def two_ways(query, prefix, segments, readout):
    found = [attend(query[None], *(torch.cat(each) for each in zip(prefix, segment))) for segment in segments]
    logits = torch.cat([output for output, _ in found]) @ readout
    return logits.mean(0), torch.cat([lse for _, lse in found]).softmax(0) @ logits
""",
    "a5_joined_cache": """
def joined(keys, values, prefix, lengths):
    real = torch.arange(keys.shape[2] - prefix) < torch.tensor(lengths)[:, None]
    return [
        torch.cat([c[0, :, :prefix], c[:, :, prefix:].transpose(1, 2)[real].transpose(0, 1)], dim=1)[None]
        for c in (keys, values)
    ]
""",
    "a5_identity": _is_sound(MATTERS, ORDER, COPIES, near="1e-6"),
    "a5_columns": "def columns(n, context, dim):\n    return torch.ones(n, context).triu(1).tril(dim).bool()",
    "a5_parameters": """
def column_cost(context, width, layers, dim):
    cost = torch.tensor(2.0 * layers * context * width)
    return cost, (cost / layers / (2 * width + 1)).round()
""",
    "a5_targets": """
def targets(scores, value, dim):
    away = torch.arange(scores.shape[-1]) - torch.arange(scores.shape[-1])[:, None]
    seen = scores.exp() * (away <= dim)
    past, ahead = seen * (away <= 0), seen * (away > 0)
    joint, share = ahead @ value / seen.sum(-1, keepdim=True), (ahead.sum(-1) / seen.sum(-1))[..., None]
    return joint, joint - share * (past @ value) / past.sum(-1, keepdim=True)
""",
    "a5_losses": """
def future_losses(guess, truth):
    with torch.no_grad():
        truth = truth[:, :, :-1] + 0.0
    guess = guess[:, :, :-1]
    size = guess.norm(dim=-1) * truth.norm(dim=-1)
    return (guess - truth).pow(2).mean(), 0.5 - 0.5 * ((guess * truth).sum(-1) / size.clamp(min=1e-12)).mean()
""",
    "a5_causality": _is_causal(CUT),  # what is cut off cannot be looked at
}

OUTPUT, LSE = "shares[0, ..., None] * one + shares[1, ..., None] * two", "torch.logaddexp(a, b)"
END, BEGIN = "prefix + max(lengths)", "torch.arange(prefix, prefix + length)"
SHARE, OWN = "math.log(weight / sum(weights))", "-math.log(len(lengths))"
FUSED = "logits([prefix, *segments], bias)"
ROW, PREFIX = "prefix : prefix + length", "parts = [cache[:1, :, :prefix]]"
AHEAD, UNIT = "(ahead > 0) & (ahead <= dim)", "(2 * width + 1)"
JOINT, FUTURE = "both.masked_fill(past, 0.0) @ value", "torch.where(open_cells & ~past, scores, -torch.inf).softmax(-1)"
NEAR = "(guess, truth, dim=-1)"

WRONG = {
    "a5_segment_mask": [
        ("plain causal table", _mask("j <= i")),
        ("do not see the prefix", _mask("j <= i and (g[i] == g[j] or g[i] == last)")),
        ("sees no segment", _mask("j <= i and (g[i] == g[j] or g[j] == 0)")),
        ("last segment alone", _mask("j <= i and (g[i] == g[j] or g[j] == 0 or g[i] == last and g[j] == last - 1)")),
        ("in their own block", _mask("g[i] == g[j] or g[j] == 0 or g[i] == last")),
        ("its own future", _mask("j <= i and (g[i] == g[j] or g[j] == 0) or g[i] == last")),
        ("turned over", _mask("i <= j and (g[i] == g[j] or g[i] == 0 or g[j] == last)")),
    ],
    "a5_merge": [
        ("count alike", OUTPUT, "(one + two) / 2"),
        ("You added the outputs", OUTPUT, "one + two"),
        ("not of the weights", OUTPUT, "(a[..., None] * one + b[..., None] * two) / (a + b)[..., None]"),
        ("changed places", "[a, b]", "[b, a]"),
        ("the heavier group alone", OUTPUT, "torch.where((a > b)[..., None], one, two)"),
        ("You added the logarithms", LSE, "a + b"),
        ("the larger of the two", LSE, "torch.maximum(a, b)"),
        ("the mean of the two", LSE, "(a + b) / 2"),
        ("without the logarithm", LSE, "a.exp() + b.exp()"),
        ("more than a number holds", LSE, "(a.exp() + b.exp()).log()"),
        ("infinity is nan", ".nan_to_num(0.0)", ""),
    ],
    "a5_positions": [
        ("go on along the row", "torch.cat([", "torch.arange(prefix + sum(lengths) + tail) if tail else torch.cat(["),
        ("counts all segments", END, "prefix + sum(lengths)"),
        ("behind the last segment", END, "prefix + lengths[-1]"),
        ("begins anew, too", END, "prefix"),
        ("begin at 0", END, "max(lengths)", BEGIN, "torch.arange(length)"),
    ],
    "a5_key_bias": [
        ("weigh N times more", SHARE, f"-{SHARE}"),
        ("Scores are exponents", SHARE, "weight / sum(weights)"),
        ("You bias all keys alike", "[0.0]", f"[{OWN}]"),
        ("prefix is biased", "bias = [0.0]", f"bias = [{OWN}]"),
        ("tail is biased", "bias + [0.0]", f"bias + [{OWN}]"),
        ("You count tokens", SHARE, "math.log(1 / length)"),
        ("shout the prefix down", SHARE, "0.0"),
        ("do not sum to one", "/ sum(weights)", "/ (1 if max(weights) > 1 else sum(weights))"),
        ("Where do the weights enter", SHARE, OWN),
        ("through a softmax", SHARE, "weight - math.log(sum(map(math.exp, weights)))"),
    ],
    "a5_two_ways": [
        ("averaged probabilities", ".mean(0)", ".softmax(-1).mean(0)"),
        ("highest logit", ".mean(0)", ".amax(0)"),
        ("added the logits up", ".mean(0)", ".sum(0)"),
        ("have no prefix", "logits([prefix, segment])", "logits([segment])"),
        ("changed places", f"averaged, {FUSED}", f"{FUSED}, averaged"),
        ("average once more", FUSED, "averaged"),
        ("each at full weight", FUSED, "logits([prefix, *segments])"),
        ("lost the prefix", FUSED, "logits(segments)"),
    ],
    "a5_joined_cache": [
        ("once for every row", PREFIX, "parts = []", ROW, ": prefix + length"),
        ("Your pads are in it", ROW, "prefix:"),
        ("as if it had no prefix", ROW, ":length"),
        ("You lost the prefix", PREFIX, "parts = []"),
        ("takes heads for tokens", "torch.cat(parts, dim=2)", "cache.reshape(1, cache.shape[1], -1, cache.shape[3])"),
    ],
    "a5_identity": [
        ("see one another", _is_sound(ONE)),
        ("how near is near enough", _is_sound(ONE, COPIES, ORDER, MATTERS, near="0.0")),
        ("N copies shout", _is_sound(ONE, ORDER, MATTERS)),
        ("Copies look alike", _is_sound(ONE, COPIES)),
        ("one more token", _is_sound("same(fused(two, two, two), fused(two))", ORDER, MATTERS)),
        ("What numbers of copies", _is_sound(ONE, "same(fused(two, two), plain(two))", ORDER, MATTERS)),
        (
            "are yours equal",
            _is_sound(ONE, COPIES, ORDER, MATTERS, segments="[[1, 7, 5], [3, 8, 2], [17, 6, 25]]", new="[39, 38, 37]"),
        ),
        ("Nothing you ask needs the others", _is_sound(ONE, COPIES, ORDER)),
    ],
    "a5_columns": [
        ("end with the text", AHEAD, f"{AHEAD} & (torch.arange(context) < n)"),
        ("a column for itself", AHEAD, "(ahead >= 0) & (ahead < dim)"),
        ("one too few", "<= dim", "< dim"),
        ("one too far", "<= dim", "<= dim + 1"),
        ("columns of the past", "(ahead > 0) & ", ""),
        ("where does dim enter", " & (ahead <= dim)", ""),
        ("that is a memory", AHEAD, "ahead == ahead"),
    ],
    "a5_parameters": [
        ("a column has both", "layers * 2 *", "layers *"),
        ("one layer", "layers * 2 *", "2 *"),
        ("You counted dim columns. Free", "2 * context", "2 * dim"),
        ("positions share them", "2 * context", "2 * dim * context"),
        ("forgot the bias", UNIT, "(2 * width)"),
        ("for the columns of all layers", f"(layers * {UNIT})", UNIT),
        ("as many out of it", UNIT, "(width + 1)"),
        ("rounded down", "round(", "math.floor("),
        ("rounded up", "round(", "math.ceil("),
        ("no part of a unit", "round(", "("),
    ],
    "a5_targets": [
        ("Your weights of the future sum to one", JOINT, f"{FUTURE}.nan_to_num(0.0) @ value"),
        ("Your target is nan", JOINT, f"{FUTURE} @ value"),
        ("Your difference is nan", "- causal", f"- {FUTURE}"),
        ("where does dim enter", "tril(dim)", "tril(99)"),
        ("runs over the whole text", JOINT, "(scores.softmax(-1) * (open_cells & ~past)) @ value"),
        ("the past's part", "fill(past, 0.0)", "fill(~past, 0.0)"),
        ("all that attention to both gives", JOINT, "both @ value"),
        ("changed places", f"{JOINT}, (both - causal) @ value", f"(both - causal) @ value, {JOINT}"),
        ("the other sign", "both - causal", "causal - both"),
        ("Your two targets are one", "(both - causal) @ value", JOINT),
        ("nothing taken away", "(both - causal)", "both"),
        ("sees the whole future", "both - causal", "scores.softmax(-1) - causal"),
    ],
    "a5_losses": [
        ("yours counts", "[:, :, :-1]", ""),
        ("You added the squares up", "mse_loss(guess, truth)", "mse_loss(guess, truth, reduction='sum')"),
        ("took the root", "mse_loss(guess, truth)", "mse_loss(guess, truth).sqrt()"),
        ("from 0 to 2", "(1 - near) / 2", "1 - near"),
        ("smallest for opposite", "1 - near", "1 + near"),
        ("the cosine itself", "((1 - near) / 2)", "near"),
        ("along the heads", NEAR, "(guess, truth)"),
        ("along the positions", NEAR, "(guess, truth, dim=-2)"),
        ("one cosine of all numbers", NEAR, "(guess.flatten(), truth.flatten(), dim=0)"),
        ("drawn to the prediction", ".detach()", ""),
        ("was it the prediction", "guess[:, :, :-1]", "guess[:, :, :-1].detach()"),
    ],
    "a5_causality": [
        ("Where may a change show", _is_causal("not any(moved(changed(i), i + 1) for i in places)")),
        ("how many there are", _is_causal(TOKENS)),
        ("every output before the change", _is_causal("not any(moved(changed(i), 1) for i in places[4:])")),
        ("Which tokens, and which outputs", _is_causal("not moved(changed(29), 29)")),
        ("How long are your texts", _is_causal(f"{TOKENS} and {CUT}", "torch.arange(10)[None]")),
        ("no size below", _is_causal(f"{TOKENS} and {CUT}", near="1e-4")),
        ("Is one kind of change", _is_causal(TOKENS.replace("range(1, 5)", "(1, 2)"), "torch.ones(1, 30).long()")),
    ],
}
