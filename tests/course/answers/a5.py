"""Answers to A5. RIGHT: other correct ones. WRONG: misconceptions that run, each with words that its message must have."""


def _mask(cells):
    """A segment_mask by a rule over groups g (0: prefix, 1..: segments, last: tail); i, j are the query's and key's."""
    return f"""
def segment_mask(prefix, lengths, tail):
    g = [0] * prefix + [s for s, n in enumerate(lengths, 1) for _ in range(n)] + [len(lengths) + 1] * tail
    last, n = len(lengths) + 1, len(g)
    return torch.tensor([[{cells} for j in range(n)] for i in range(n)])
"""


def _merged(output, lse="torch.logaddexp(a, b)"):
    return f"""
def merged(first, second):
    (one, a), (two, b) = first, second
    share = torch.sigmoid(a - b)[..., None]
    return {output}, {lse}
"""


def _placed(starts, end, tail="tail"):
    return f"""
def positions(prefix, lengths, tail):
    starts, end = {starts}, {end}
    inside = [start + i for start, length in zip(starts, lengths) for i in range(length)]
    return [*range(prefix), *inside, *range(end, end + {tail})]
"""


def _bias(segment, prefix="0.0", tail="0.0"):
    return f"""
def key_bias(prefix, lengths, tail, weights=None):
    n, weights = len(lengths), weights or [1.0] * len(lengths)
    own = math.log(1 / n)
    inside = [{segment} for w, length in zip(weights, lengths) for _ in range(length)]
    return torch.tensor([{prefix}] * prefix + inside + [{tail}] * tail, dtype=torch.float64)
"""


def _two_ways(
    averaged="torch.stack(apart).mean(0)", fused="read([prefix, *segments], bias)", with_prefix="prefix, each"
):
    return f"""
def two_ways(query, prefix, segments, readout):
    def read(groups, bias=0.0):
        keys, values = (torch.cat(each) for each in zip(*groups))
        return (keys @ query + bias).softmax(0) @ values @ readout

    apart = [read([{with_prefix}]) for each in segments]
    low, (p, n) = -math.log(len(segments)), (len(prefix[0]), sum(len(keys) for keys, _ in segments))
    bias = torch.cat([torch.zeros(p), torch.full((n,), low)]).double()
    return {averaged}, {fused}
"""


def _joined(parts):
    return f"""
def joined(keys, values, prefix, lengths):
    return tuple(torch.cat([{parts}], dim=1)[None] for cache in (keys, values))
"""


def _is_sound(*tests, segments="[[11, 7], [30, 8, 22, 9], [17, 6, 25]]", near="1e-9"):
    return f"""
def is_sound(engine, model):
    prefix, cue, segments = [1, 2, 3], [4, 5], {segments}

    def same(one, other):
        return bool((one - other).abs().max() <= {near})

    def plain(segment):
        return model(torch.tensor([prefix + segment + cue]))[0, -1]

    def fused(*segments):
        return engine(prefix, list(segments), cue)

    one, two, three = segments
    return {" and ".join(tests) or "True"}
"""


ONE = "all(same(fused(each), plain(each)) for each in segments)"
COPIES = "all(same(fused(*[each] * 5), plain(each)) for each in segments)"
ORDER = "same(fused(*segments), fused(*segments[::-1])) and same(fused(*segments), fused(two, three, one))"
MATTERS = "not any(same(fused(*segments), fused(*rest, [39])) for rest in ((one, two), (one, three), (two, three)))"


def _columns(cells):
    return f"""
def columns(n, context, dim):
    return torch.tensor([[{cells} for j in range(context)] for i in range(n)])
"""


def _cost(parameters="2 * layers * context * width", wider="round(2 * context * width / (2 * width + 1))"):
    return f"def column_cost(context, width, layers, dim):\n    return {parameters}, {wider}"


def _targets(joint="(both * ahead) @ value", difference="both @ value - causal @ value"):
    return f"""
def targets(scores, value, dim):
    n = scores.shape[-1]
    away = torch.arange(n) - torch.arange(n)[:, None]
    past, ahead = away <= 0, (away > 0) & (away <= dim)

    def over(seen):
        return scores.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num(0.0)

    both, causal, whole = over(past | ahead), over(past), scores.softmax(-1)
    return {joint}, {difference}
"""


def _losses(
    square="((guess - truth) ** 2).mean()", near="((1 - cosine(guess, truth)) / 2).mean()", first="", cut=":-1"
):
    return f"""
def future_losses(guess, truth):
    cosine = torch.nn.CosineSimilarity(dim=-1)
    guess, truth = guess[:, :, {cut}], truth[:, :, {cut}].detach()
    {first}
    return {square}, {near}
"""


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
PLAIN_LOSSES = _losses().replace(".detach()", "")

RIGHT = {
    "a5_segment_mask": [
        _mask("j <= i and (g[i] == g[j] or g[j] == 0 or g[i] == last)"),
        """
def segment_mask(prefix, lengths, tail):
    numbers = [0] * prefix + [s for s, n in enumerate(lengths, 1) for _ in range(n)]
    n = len(numbers) + tail
    mask = masks.segments(numbers + [-1] * tail, fuse_from=len(numbers)).dense(n)
    mask[:, :prefix] |= masks.causal().dense(n)[:, :prefix]
    return mask
""",
    ],
    "a5_merge": [
        """
def merged(first, second):
    (one, a), (two, b) = first, second
    top = torch.maximum(a, b).clamp(min=-1e30)
    x, y = (a - top).exp(), (b - top).exp()
    total = x + y
    output = (x[..., None] * one + y[..., None] * two) / total.clamp(min=1e-300)[..., None]
    return output, top + total.log()
""",
        """
def merged(first, second):
    (one, a), (two, b) = first, second
    lse = torch.logsumexp(torch.stack([a, b]), dim=0)
    x, y = ((each - lse).exp().nan_to_num(0.0)[..., None] for each in (a, b))
    return [x * one + y * two, lse]
""",
    ],
    "a5_positions": [
        _placed("[prefix] * len(lengths)", "prefix + max(lengths)"),
        """
def positions(prefix, lengths, tail):
    blocks = [range(prefix, prefix + length) for length in lengths]
    places = [*range(prefix), *(i for block in blocks for i in block)]
    for _ in range(tail):
        places.append(max(places) + 1)
    return torch.tensor(places)
""",
    ],
    "a5_key_bias": [
        _bias("math.log(w / sum(weights))"),
        """
def key_bias(prefix, lengths, tail, weights=None):
    weights = torch.ones(len(lengths)) if weights is None else torch.tensor(weights)
    each = (weights / weights.sum()).log().repeat_interleave(torch.tensor(lengths))
    return torch.nn.functional.pad(each, (prefix, tail))
""",
    ],
    "a5_two_ways": [
        _two_ways(),
        _two_ways(fused="read([prefix] * len(segments) + segments)"),  # the prefix N times: the same proportion
        """
def two_ways(query, prefix, segments, readout):
    found = [attend(query[None], *(torch.cat(each) for each in zip(prefix, segment))) for segment in segments]
    logits = torch.cat([output for output, _ in found]) @ readout
    return logits.mean(0), torch.cat([lse for _, lse in found]).softmax(0) @ logits
""",
    ],
    "a5_joined_cache": [
        _joined("cache[0, :, :prefix], *(row[:, prefix : prefix + n] for row, n in zip(cache, lengths))"),
        """
def joined(keys, values, prefix, lengths):
    longest = keys.shape[2] - prefix
    real = torch.arange(longest) < torch.tensor(lengths)[:, None]
    return [
        torch.cat([c[0, :, :prefix], c[:, :, prefix:].transpose(1, 2)[real].transpose(0, 1)], dim=1)[None]
        for c in (keys, values)
    ]
""",
    ],
    "a5_identity": [_is_sound(ONE, COPIES, ORDER, MATTERS), _is_sound(MATTERS, ORDER, COPIES, near="1e-6")],
    "a5_columns": [
        _columns("i < j <= i + dim"),
        "def columns(n, context, dim):\n    return torch.ones(n, context).triu(1).tril(dim).bool()",
    ],
    "a5_parameters": [
        _cost(),
        """
def column_cost(context, width, layers, dim):
    cost = 2 * context * width
    return layers * cost, min(range(context + 1), key=lambda more: abs(more * (2 * width + 1) - cost))
""",
        _cost(wider="int(2 * context * width / (2 * width + 1) + 0.5)"),
        _cost("2.0 * layers * context * width", "round(2.0 * context * width / (2 * width + 1), 0)"),
        """
def column_cost(context, width, layers, dim):
    cost = torch.tensor(2.0 * layers * context * width)
    return cost, (cost / layers / (2 * width + 1)).round()
""",
    ],
    "a5_targets": [
        _targets(),
        _targets(difference="(both * ahead) @ value - (both * ahead).sum(-1, keepdim=True) * (causal @ value)"),
    ],
    "a5_losses": [
        _losses(),
        """
def future_losses(guess, truth):
    with torch.no_grad():
        truth = truth[:, :, :-1] + 0.0
    guess = guess[:, :, :-1]
    size = guess.norm(dim=-1) * truth.norm(dim=-1)
    return (guess - truth).pow(2).mean(), 0.5 - 0.5 * ((guess * truth).sum(-1) / size.clamp(min=1e-12)).mean()
""",
    ],
    "a5_causality": [
        _is_causal(f"{TOKENS} and {CUT}"),
        _is_causal(CUT),  # enough by itself: what is cut off cannot be looked at
        """
def is_causal(model):
    generator = torch.Generator().manual_seed(5)
    for n in (2, 5, 17, 48):
        ids = torch.randint(40, (16, n), generator=generator)
        before = model(ids)
        for cut in range(1, n):
            other = torch.cat([ids[:, :cut], torch.randint(40, (16, n - cut), generator=generator)], dim=1)
            for after in (model(other), model(ids[:, :cut])):
                if not torch.allclose(after[:, :cut], before[:, :cut], rtol=0, atol=1e-9):
                    return False
    return True
""",
    ],
}

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
        ("count alike", _merged("(one + two) / 2")),
        ("You added the outputs", _merged("one + two")),
        ("a logarithm is no weight", _merged("(a[..., None] * one + b[..., None] * two) / (a + b)[..., None]")),
        ("changed places", _merged("(1 - share) * one + share * two")),
        ("the heavier group alone", _merged("torch.where(share > 0.5, one, two)")),
        ("You added the logarithms", _merged("share * one + (1 - share) * two", "a + b")),
        ("the larger of the two", _merged("share * one + (1 - share) * two", "torch.maximum(a, b)")),
        ("without the logarithm", _merged("share * one + (1 - share) * two", "a.exp() + b.exp()")),
        ("more than a number holds", _merged("share * one + (1 - share) * two", "(a.exp() + b.exp()).log()")),
        ("minus infinity is nan", _merged("share * one + (1 - share) * two")),
    ],
    "a5_positions": [
        (
            "go on along the row",
            _placed("[prefix + sum(lengths[:k]) for k in range(len(lengths))]", "prefix + sum(lengths)"),
        ),
        ("counts all segments", _placed("[prefix] * len(lengths)", "prefix + sum(lengths)")),
        ("behind the last segment", _placed("[prefix] * len(lengths)", "prefix + lengths[-1]")),
        ("begins anew, too", _placed("[prefix] * len(lengths)", "prefix")),
        ("begin at 0", _placed("[0] * len(lengths)", "max(lengths)")),
    ],
    "a5_key_bias": [
        ("weigh N times more", _bias("-own")),
        ("Scores are exponents", _bias("1 / n")),
        ("You bias all keys alike", _bias("own", "own", "own")),
        ("prefix is biased", _bias("own", "own")),
        ("tail is biased", _bias("own", tail="own")),
        ("You count tokens", _bias("math.log(1 / length)")),
        ("shout the prefix down", _bias("0.0")),
        ("do not sum to one", _bias("math.log(w) if sum(weights) != n else own")),
        ("Where do the weights enter", _bias("own")),
        ("through a softmax", _bias("w - math.log(sum(math.exp(each) for each in weights))")),
    ],
    "a5_two_ways": [
        ("averaged probabilities", _two_ways(averaged="torch.stack(apart).softmax(-1).mean(0)")),
        ("highest logit", _two_ways(averaged="torch.stack(apart).amax(0)")),
        ("added the logits up", _two_ways(averaged="sum(apart)")),
        ("have no prefix", _two_ways(with_prefix="each")),
        ("changed places", _two_ways(averaged="read([prefix, *segments], bias)", fused="sum(apart) / len(apart)")),
        ("average once more", _two_ways(fused="sum(apart) / len(apart)")),
        ("each at full weight", _two_ways(fused="read([prefix, *segments])")),
        ("lost the prefix", _two_ways(fused="read(segments)")),
    ],
    "a5_joined_cache": [
        ("once for every row", _joined("*(row[:, : prefix + n] for row, n in zip(cache, lengths))")),
        ("Your pads are in it", _joined("cache[0, :, :prefix], *cache[:, :, prefix:]")),
        ("as if it had no prefix", _joined("cache[0, :, :prefix], *(row[:, :n] for row, n in zip(cache, lengths))")),
        ("You lost the prefix", _joined("*(row[:, prefix : prefix + n] for row, n in zip(cache, lengths))")),
        ("takes heads for tokens", _joined("cache.reshape(cache.shape[1], -1, cache.shape[3])")),
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
            _is_sound(ONE, COPIES, ORDER, MATTERS, segments="[[11, 7, 5], [30, 8, 22], [17, 6, 25]]").replace(
                "[39]", "[39, 38, 37]"
            ),
        ),
        ("Nothing you ask needs the others", _is_sound(ONE, COPIES, ORDER)),
    ],
    "a5_columns": [
        ("end with the text", _columns("i < j <= i + dim and j < n")),
        ("a column for itself", _columns("i <= j < i + dim")),
        ("one too few", _columns("i < j < i + dim")),
        ("one too far", _columns("i < j <= i + dim + 1")),
        ("columns of the past", _columns("j <= i + dim")),
        ("where does dim enter", _columns("i < j")),
        ("that is a memory", _columns("True")),
    ],
    "a5_parameters": [
        ("a column has both", _cost("layers * context * width")),
        ("one layer", _cost("2 * context * width")),
        ("You counted dim columns. Free", _cost("2 * layers * dim * width")),
        ("positions share them", _cost("2 * layers * dim * width * context")),
        ("forgot the bias", _cost(wider="context")),
        ("for the columns of all layers", _cost(wider="round(2 * layers * context * width / (2 * width + 1))")),
        ("as many out of it", _cost(wider="round(2 * context * width / (width + 1))")),
        ("rounded down", _cost(wider="2 * context * width // (2 * width + 1)")),
        ("rounded up", _cost(wider="math.ceil(2 * context * width / (2 * width + 1))")),
        ("no part of a unit", _cost(wider="2 * context * width / (2 * width + 1)")),
    ],
    "a5_targets": [
        ("sum to one by themselves", _targets("over(ahead) @ value")),
        ("are nan", _targets("scores.masked_fill(~ahead, -torch.inf).softmax(-1) @ value")),
        (
            "divided by a weight of 0",
            _targets(
                "(both * ahead).sum(-1, keepdim=True) * (both * ahead @ value / (both * ahead).sum(-1, keepdim=True))"
            ),
        ),
        (
            "without that there is none",
            _targets(difference="both @ value - scores.masked_fill(away >= 0, -torch.inf).softmax(-1) @ value"),
        ),
        ("or scores", _targets("(scores.masked_fill(~(past | ahead), -torch.inf) * ahead).softmax(-1) @ value")),
        ("where does dim enter", _targets("(whole * (away > 0)) @ value")),
        ("runs over the whole text", _targets("(whole * ahead) @ value")),
        ("the past's part", _targets("(both * past) @ value")),
        ("all that attention to both gives", _targets("both @ value")),
        ("changed places", _targets("(both - causal) @ value", "(both * ahead) @ value")),
        ("the other sign", _targets(difference="causal @ value - both @ value")),
        ("Your two targets are one", _targets(difference="(both * ahead) @ value")),
        ("nothing taken away", _targets(difference="both @ value")),
        ("sees the whole future", _targets(difference="(whole - causal) @ value")),
    ],
    "a5_losses": [
        ("yours counts", _losses(cut=":")),
        ("You added the squares up", _losses("((guess - truth) ** 2).sum()")),
        ("took the root", _losses("((guess - truth) ** 2).mean().sqrt()")),
        ("from 0 to 2", _losses(near="(1 - cosine(guess, truth)).mean()")),
        ("smallest for opposite", _losses(near="((1 + cosine(guess, truth)) / 2).mean()")),
        ("the cosine itself", _losses(near="cosine(guess, truth).mean()")),
        ("along the heads", _losses(near="((1 - torch.nn.functional.cosine_similarity(guess, truth)) / 2).mean()")),
        ("along the positions", _losses(near="((1 - torch.cosine_similarity(guess, truth, dim=-2)) / 2).mean()")),
        ("one cosine of all numbers", _losses(near="(1 - cosine(guess.reshape(-1), truth.reshape(-1))) / 2")),
        ("drawn to the prediction", PLAIN_LOSSES),
        ("was it the prediction", _losses(first="guess = guess.detach()")),
    ],
    "a5_causality": [
        ("Where may a change show", _is_causal("not any(moved(changed(i), i + 1) for i in places)")),
        ("how many there are", _is_causal(TOKENS)),
        ("every output before the change", _is_causal("not any(moved(changed(i), 1) for i in places[4:])")),
        ("Which tokens, and which outputs", _is_causal("not moved(changed(29), 29)")),
        ("How long are your texts", _is_causal(f"{TOKENS} and {CUT}", "torch.arange(10)[None]")),
        ("no size below", _is_causal(f"{TOKENS} and {CUT}", near="1e-4")),
        (
            "Is one kind of change enough",
            _is_causal(TOKENS.replace("range(1, 5)", "(1, 2)"), "torch.ones(1, 30).long()"),
        ),
    ],
}
