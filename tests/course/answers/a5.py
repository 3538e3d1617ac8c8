"""Answers to A5. RIGHT: a correct one beside the solution. WRONG: words of the message, and what to change in the solution."""


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
    "a5_tree_mask": """
def tree_mask(parents, lengths):
    def up(s):
        return [] if s < 0 else [s, *up(parents[s])]

    g = [s for s, length in enumerate(lengths) for _ in range(length)]
    return torch.tensor([[j <= i and g[j] in up(g[i]) for j in range(len(g))] for i in range(len(g))])
""",
    "a5_merge": """
def merged(first, second):
    (one, a), (two, b) = first, second
    lse = torch.logsumexp(torch.stack([a, b]), dim=0)
    x, y = ((each - lse).exp().nan_to_num(0.0)[..., None] for each in (a, b))
    return [x * one + y * two, lse]
""",
    "a5_tree_positions": """
def tree_positions(parents, lengths):
    def end(s):
        return 0 if s < 0 else end(parents[s]) + lengths[s]

    return [end(parent) + i for parent, length in zip(parents, lengths) for i in range(length)]
""",
    "a5_tree_bias": """
def tree_bias(parents, lengths):
    bias = [0.0]
    for parent in parents[1:]:
        bias.append(bias[parent] - math.log(parents.count(parent)))
    return torch.tensor([number for number, length in zip(bias, lengths) for _ in range(length)])
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
    "a5_block_columns": """
def block_columns(n, context, size, dim):
    blocks = range(context // size)
    return torch.tensor([[i < b * size <= (i // size + dim) * size for b in blocks] for i in range(n)])
""",
    "a5_parameters": """
def column_cost(context, size, width, layers, dim):
    cost = torch.tensor(2.0 * layers * context / size * width)
    return cost, (cost / layers / (2 * width + 1)).round()
""",
    "a5_targets": """
def targets(both, past):
    difference = both[0] - past[0]
    future = -torch.expm1(past[1] - both[1])[..., None]
    return [difference + future * past[0], difference]
""",
    "a5_control_loss": """
def control_loss(guess, truth, lengths):
    own, other = [], []
    for b, length in enumerate(lengths):
        for i in range(length - 1):
            for losses, a in ((own, b), (other, b - 1)):
                if i < lengths[a] - 1:
                    target = truth[a, i].detach()
                    losses.append(0.5 - 0.5 * (guess[b, i] @ target) / guess[b, i].norm() / target.norm())
    return torch.stack(own).mean(), torch.stack(other).mean()
""",
    "a5_causality": _is_causal(CUT),  # what is cut off cannot be looked at
}

OUTPUT, LSE = "shares[0, ..., None] * one + shares[1, ..., None] * two", "torch.logaddexp(a, b)"
TREE, STEP = "reach[owner][:, owner].tril()", "reach[segment] |= reach[parent]"
START, SHARE = "ends[parent] if parent >= 0 else 0", "weights[parent] / parents.count(parent)"
FUSED = "logits([prefix, *segments], bias)"
ROW, PREFIX = "prefix : prefix + length", "parts = [cache[:1, :, :prefix]]"
AHEAD, BLOCKS, UNIT = "(ahead > 0) & (ahead <= dim)", "(context // size)", "(2 * width + 1)"
JOINT, PAST = "output - share * causal", "(part - total).exp()"
COUNTED, LOSS = "torch.arange(guess.shape[1]) < torch.tensor(lengths)[:, None] - 1", "((1 - near) / 2)[counted].mean()"
OWN, OTHER = "loss(truth, future)", "loss(truth.roll(1, 0), future & future.roll(1, 0))"

WRONG = {
    "a5_tree_mask": [
        ("plain causal mask", TREE, "torch.ones(len(owner), len(owner)).tril().bool()"),
        ("the parent of their parent", STEP, "reach[segment, parent] = True"),
        ("attend to themselves only", STEP, "pass"),
        ("segment 0 and", STEP, "reach[segment, 0] = True"),
        ("with the same parent", STEP, f"{STEP} | (torch.tensor(parents) == parent)"),
        ("later tokens of their own", ".tril()", ""),
        ("is transposed", ".tril()", ".tril().T"),
    ],
    "a5_merge": [
        ("equal shares", OUTPUT, "(one + two) / 2"),
        ("You added the outputs", OUTPUT, "one + two"),
        ("the lse as weights", OUTPUT, "(a[..., None] * one + b[..., None] * two) / (a + b)[..., None]"),
        ("swapped", "[a, b]", "[b, a]"),
        ("the larger lse only", OUTPUT, "torch.where((a > b)[..., None], one, two)"),
        ("You added the two lse", LSE, "a + b"),
        ("the larger of the two", LSE, "torch.maximum(a, b)"),
        ("the mean of the two", LSE, "(a + b) / 2"),
        ("Take its logarithm", LSE, "a.exp() + b.exp()"),
        ("overflows", LSE, "(a.exp() + b.exp()).log()"),
        ("infinity is nan", ".nan_to_num(0.0)", ""),
    ],
    "a5_tree_positions": [
        ("go on along the row", "torch.cat(positions)", "torch.arange(sum(lengths))"),
        ("all begin at 0", START, "0"),
        ("all begin after segment 0", START, "ends[0] if parent >= 0 else 0"),
        ("length of the parent", "ends[parent] if", "lengths[parent] if"),
        ("leave a gap", "ends[parent] if", "ends[parent] + 1 if"),
    ],
    "a5_tree_bias": [
        ("wrong sign", ".log()", ".log().neg()"),
        ("is the weight", ".log()", ""),
        ("only the segments with the same parent", SHARE, "1 / parents.count(parent)"),
        (
            "at the same depth",
            "return torch",
            "depth = []\n    for p in parents:\n        depth.append(depth[p] + 1 if p >= 0 else 0)\n"
            "    weights = [1 / depth.count(d) for d in depth]\n    return torch",
        ),
        ("have the same weight", SHARE, "1 / (len(parents) - 1)"),
        ("number of tokens", "torch.tensor(weights, dtype=torch.float64)", "(1 / torch.tensor(lengths).double())"),
        ("no bias", ".log()", ".log().mul(0)"),
    ],
    "a5_two_ways": [
        ("averaged probabilities", ".mean(0)", ".softmax(-1).mean(0)"),
        ("largest logits", ".mean(0)", ".amax(0)"),
        ("You added the logits", ".mean(0)", ".sum(0)"),
        ("have no prefix", "logits([prefix, segment])", "logits([segment])"),
        ("in the wrong order", f"averaged, {FUSED}", f"{FUSED}, averaged"),
        ("an average too", FUSED, "averaged"),
        ("no bias", FUSED, "logits([prefix, *segments])"),
        ("do not use the prefix", FUSED, "logits(segments)"),
    ],
    "a5_joined_cache": [
        ("prefix of every row", PREFIX, "parts = []", ROW, ": prefix + length"),
        ("has padding", ROW, "prefix:"),
        ("as if it had no prefix", ROW, ":length"),
        ("has no prefix", PREFIX, "parts = []"),
        ("mixes heads and tokens", "torch.cat(parts, dim=2)", "cache.reshape(1, cache.shape[1], -1, cache.shape[3])"),
    ],
    "a5_identity": [
        ("attend to earlier segments", _is_sound(ONE)),
        ("allow a difference", _is_sound(ONE, COPIES, ORDER, MATTERS, near="0.0")),
        ("weigh too much", _is_sound(ONE, ORDER, MATTERS)),
        ("With copies", _is_sound(ONE, COPIES)),
        ("with the plain model", _is_sound("same(fused(two, two, two), fused(two))", ORDER, MATTERS)),
        ("What numbers of copies", _is_sound(ONE, "same(fused(two, two), plain(two))", ORDER, MATTERS)),
        (
            "different lengths",
            _is_sound(ONE, COPIES, ORDER, MATTERS, segments="[[1, 7, 5], [3, 8, 2], [17, 6, 25]]", new="[39, 38, 37]"),
        ),
        ("each segment matters", _is_sound(ONE, COPIES, ORDER)),
    ],
    "a5_block_columns": [
        ("end with the text", AHEAD, f"{AHEAD} & (torch.arange(context // size) * size < n)"),
        ("of its own block", AHEAD, "(ahead >= 0) & (ahead < dim)"),
        ("one column too few", "<= dim", "< dim"),
        ("one column too many", "<= dim", "<= dim + 1"),
        ("earlier blocks", "(ahead > 0) & ", ""),
        ("Where do you use dim", " & (ahead <= dim)", ""),
        ("for each position", "context // size", "context", "[:, None] // size", "[:, None]"),
        (
            "a number of blocks",
            "def block_columns(n, context, size, dim):\n    ahead = torch.arange(0, context, size) - torch.arange(n)[:, None]"
            f"\n    return {AHEAD}",
        ),
    ],
    "a5_parameters": [
        ("A column has both", "layers * 2 *", "layers *"),
        ("counted one layer", "layers * 2 *", "2 *"),
        ("for each position", BLOCKS, "context"),
        ("You counted dim columns. There", BLOCKS, "dim"),
        ("Positions share the columns", BLOCKS, f"dim * {BLOCKS}"),
        ("forgot the bias", UNIT, "(2 * width)"),
        ("of all layers", f"(layers * {UNIT})", UNIT),
        ("as many out of it", UNIT, "(width + 1)"),
        ("rounded down", "round(", "math.floor("),
        ("rounded up", "round(", "math.ceil("),
        ("nearest whole number", "round(", "("),
    ],
    "a5_targets": [
        ("overflows", PAST, "(part.exp() / total.exp())"),
        ("whole output of `both`", JOINT, "output"),
        ("is the part of the past", JOINT, "share * causal"),
        ("only a share of the weight", JOINT, "output - causal"),
        ("share of the future", PAST, f"(1 - {PAST})"),
        ("the softmax of exercise 2", PAST, "torch.stack([part, total]).softmax(0)[0]"),
        ("is the inverse", "part - total", "total - part"),
        ("wrong sign", "output - causal", "causal - output"),
        ("two targets are equal", "output - causal", JOINT),
        ("is the output of `both`", "output - causal", "output"),
    ],
    "a5_control_loss": [
        ("last token of a text", COUNTED, COUNTED[:-4]),
        ("count the padding", "[counted]", ""),
        (
            "means of texts",
            LOSS,
            "torch.stack([((1 - row) / 2)[keep].mean() for row, keep in zip(near, counted)]).mean()",
        ),
        ("not divided by 2", "((1 - near) / 2)", "(1 - near)"),
        ("opposite directions", "1 - near", "1 + near"),
        ("runs along the positions", "dim=-1", "dim=1", "[counted]", ""),
        ("in the wrong order", f"{OWN}, {OTHER}", f"{OTHER}, {OWN}"),
        ("that of the own text", "truth.roll(1, 0)", "truth"),
        ("text b + 1", "roll(1, 0)", "roll(-1, 0)"),
        ("Move them along the batch", OTHER, "loss(truth.roll(1, 1), future)"),
        ("in the other text", "future & future.roll(1, 0)", "future"),
        ("future in the own text", "future & future.roll(1, 0)", "future.roll(1, 0)"),
        ("trains the target too", ".detach()", ""),
        ("trains nothing", "truth = truth.detach()", "guess, truth = guess.detach(), truth.detach()"),
    ],
    "a5_causality": [
        ("Which outputs may change", _is_causal("not any(moved(changed(i), i + 1) for i in places)")),
        ("number of later tokens", _is_causal(TOKENS)),
        ("every output before the change", _is_causal("not any(moved(changed(i), 1) for i in places[4:])")),
        ("Which tokens and outputs", _is_causal("not moved(changed(29), 29)")),
        ("How long are your texts", _is_causal(f"{TOKENS} and {CUT}", "torch.arange(10)[None]")),
        ("small leaks", _is_causal(f"{TOKENS} and {CUT}", near="1e-4")),
        ("several tokens", _is_causal(TOKENS.replace("range(1, 5)", "(1, 2)"), "torch.ones(1, 30).long()")),
    ],
}
