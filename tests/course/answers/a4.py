"""Answers to A4. RIGHT: other correct ones. WRONG: misconceptions that run, each with words that its message must have."""

RIGHT = {
    "a4_layer_mask": [
        """
from labkit import masks

def layer_mask(n, w, layer, every):
    kind = masks.bidirectional() if layer % every == every - 1 else masks.sliding_window(w, causal=False)
    return kind.dense(n)
""",
        """
def layer_mask(n, w, layer, every):
    kinds = ([0] * (every - 1) + [1]) * (layer + 1)
    return torch.tensor([[bool(kinds[layer]) or i - w < j < i + w for j in range(n)] for i in range(n)])
""",
        """
def layer_mask(n, w, layer, every):
    reach = n if layer % every == every - 1 else w - 1
    return torch.ones(n, n).tril(reach).triu(-reach).bool()
""",
    ],
    "a4_grouped": [
        """
def grouped_attention(q, k, v, mask, scalar):
    out = torch.zeros(len(q), q.shape[1], v.shape[2])
    for h in range(len(q)):
        group = h // (len(q) // len(k))
        for i in range(q.shape[1]):
            seen = mask[i].nonzero()[:, 0]
            weights = ((k[group][seen] @ q[h, i]) / scalar**0.5).softmax(0)
            out[h, i] = weights @ v[group][seen]
    return out
""",
        """
def grouped_attention(q, k, v, mask, scalar):
    q = q.view(len(k), len(q) // len(k), *q.shape[1:])
    scores = torch.einsum("gend,gmd->genm", q, k) * scalar**-0.5
    weights = torch.where(mask, scores, -torch.inf).softmax(-1)
    return torch.einsum("genm,gmd->gend", weights, v).flatten(0, 1)
""",
    ],
    "a4_token_labels": [
        """
def token_labels(offsets, spans, tags, numbers):
    labels = []
    for t, (a, b) in enumerate(offsets):
        label = -100
        for (start, end), tag in zip(spans, tags):
            if a < end and b > start and not any(c < end and d > start for c, d in offsets[t + 1 :]):
                label = numbers[tag]
        labels.append(label)
    return labels
""",
        """
def token_labels(offsets, spans, tags, numbers):
    labels = torch.full((len(offsets),), -100)
    places = torch.tensor(offsets)
    for (start, end), tag in zip(spans, tags):
        held = ((places[:, 0] < end) & (places[:, 1] > start)).nonzero()
        if len(held):
            labels[held[-1]] = numbers[tag]
    return labels
""",
    ],
    "a4_entity_f1": [
        """
def entity_f1(gold, predicted):
    def entities(tags):
        tags = [t if t[0] != "I" or (k and tags[k - 1][1:] == t[1:]) else "B" + t[1:] for k, t in enumerate(tags)]
        found = []
        for k, tag in enumerate(tags):
            if tag[0] == "B":
                stop = k + 1
                while stop < len(tags) and tags[stop] == "I" + tag[1:]:
                    stop += 1
                found.append((k, stop, tag[2:]))
        return found

    hit = there = said = 0
    for a, b in zip(gold, predicted):
        a, b = entities(a), entities(b)
        hit, there, said = hit + sum(each in a for each in b), there + len(a), said + len(b)
    if not hit:
        return 0.0
    p, r = hit / said, hit / there
    return 2 * p * r / (p + r)
""",
    ],
    "a4_windows": [
        """
def windows(n, room, step):
    starts = range(0, max(n - room, 0) + step, step)
    return [(a, min(a + room, n)) for a in starts]
""",
        """
def windows(n, room, step):
    found = [[0, min(room, n)]]
    while found[-1][1] < n:
        found.append([found[-1][0] + step, min(found[-1][0] + step + room, n)])
    return found
""",
    ],
    "a4_best_answer": [
        """
def best_answer(text, rows, longest):
    spans = []
    for offsets, start, end in rows:
        inside = torch.tensor([place is not None for place in offsets])
        n = len(offsets)
        scores = torch.tensor(start, dtype=torch.float64)[:, None] + torch.tensor(end, dtype=torch.float64)[None, :]
        allowed = torch.ones(n, n).triu().tril(longest - 1).bool() & inside[:, None] & inside[None, :]
        scores = scores.masked_fill(~allowed, -torch.inf)
        i, j = divmod(int(scores.argmax()), n)
        spans.append((scores[i, j].item(), offsets[i][0], offsets[j][1]))
    score, a, b = max(spans)
    if min(start[-1] + end[-1] for _, start, end in rows) > score:
        return None
    while text[a].isspace():
        a += 1
    return [a, b]
""",
        """
def best_answer(text, rows, longest):
    pairs = [
        (s[i] + e[j], o[i][0], o[j][1])
        for o, s, e in rows
        for i in range(len(o)) if o[i]
        for j in range(i, len(o)) if o[j] and j - i < longest
    ]
    score, a, b = sorted(pairs)[-1]
    lowest = sorted(s[-1] + e[-1] for _, s, e in rows)[0]
    return (a + (text[a] == " "), b) if score >= lowest else None
""",
    ],
    "a4_compare": [
        """
def compare(one, other, seeds, texts):
    apart = one - other
    gaps = apart[seeds[:, :, None], texts[:, None, :]].mean((1, 2))
    low, high = torch.quantile(gaps, torch.tensor([0.025, 0.975], dtype=gaps.dtype))
    return apart.mean(), low, high, None if low <= 0 <= high else "one" if low > 0 else "other"
""",
        """
def compare(one, other, seeds, texts):
    gaps = sorted(
        float(one[s][:, t].mean() - other[s][:, t].mean()) if (one[s][:, t] != other[s][:, t]).any() else 0.0
        for s, t in zip(seeds, texts)
    )

    def quantile(share):
        place = share * (len(gaps) - 1)
        below = int(place)
        above = min(below + 1, len(gaps) - 1)
        return gaps[below] + (place - below) * (gaps[above] - gaps[below])

    low, high = quantile(0.025), quantile(0.975)
    claim = None
    if low > 0:
        claim = "one"
    elif high < 0:
        claim = "other"
    return one.mean().item() - other.mean().item(), low, high, claim
""",
    ],
}

_SPANS = """
def spans_of(tags, kinds=True, strays=True):
    found, first = [], None
    for k, tag in enumerate([*tags, "O"]):
        goes_on = first is not None and tag == "I-" + tags[first][2:]
        if first is not None and not goes_on:
            if strays or tags[first][0] == "B":
                found.append((first, k, tags[first][2:] if kinds else ""))
            first = None
        if tag != "O" and not goes_on:
            first = k
    return found

def f_of(a, b):
    return 2 * len(a & b) / max(len(a) + len(b), 1)
"""

_ANSWER = """
def best_answer(text, rows, longest):
    best, place, nothing = float("-inf"), None, []
    for offsets, start, end in rows:
        nothing.append(start[-1] + end[-1])
        here = [t for t in range(len(offsets)) if offsets[t] is not None]
        for i in here:
            for j in here:
                if {allowed} and start[i] + end[j] > best:
                    best, place = start[i] + end[j], ({first}, {last})
    if {none}:
        return None
    a, b = place
    return a + {space}, b
"""


def _answer(allowed="i <= j < i + longest", none="min(nothing) > best", space="(text[a] == ' ')", **places):
    first, last = places.get("first", "offsets[i][0]"), places.get("last", "offsets[j][1]")
    return _ANSWER.format(allowed=allowed, none=none, space=space, first=first, last=last)


_COMPARE = """
def compare(one, other, seeds, texts):
    apart = one - other
    gaps = torch.stack([{gap} for s, t in zip(seeds, texts)])
    low, high = torch.quantile(gaps, {tail}).item(), torch.quantile(gaps, 1 - {tail}).item()
    return {mean}, low, high, {claim}
"""


def _compare(
    gap="apart[s][:, t].mean()",
    tail="0.025",
    mean="apart.mean()",
    claim="'one' if low > 0 else 'other' if high < 0 else None",
):
    return _COMPARE.format(gap=gap, tail=tail, mean=mean, claim=claim)


_LABELS = """
def token_labels(offsets, spans, tags, numbers):
    labels = [{rest}] * len(offsets)
    for (start, end), tag in zip(spans, tags):
        held = [t for t, (a, b) in enumerate(offsets) if {held}]
        for t in held{chosen}:
            labels[t] = numbers[tag]
    return labels{after}
"""


def _labels(rest="-100", held="a < end and start < b", chosen="[-1:]", after=""):
    return _LABELS.format(rest=rest, held=held, chosen=chosen, after=after)


_MASK = """
def layer_mask(n, w, layer, every):
    i, j = torch.arange(n)[:, None], torch.arange(n)[None, :]
    if {whole}:
        return torch.ones(n, n, dtype=torch.bool)
    return {local}
"""

_GROUPED = """
def grouped_attention(q, k, v, mask, scalar):
    each = len(q) // len(k)
    {shared}
    scores = q @ k.transpose(-2, -1) / {scale}
    return scores.masked_fill({banned}, -torch.inf).softmax(-1) @ v
"""


def _grouped(
    shared="k, v = k.repeat_interleave(each, 0), v.repeat_interleave(each, 0)", scale="scalar**0.5", banned="~mask"
):
    return _GROUPED.format(shared=shared, scale=scale, banned=banned)


WRONG = {
    "a4_layer_mask": [
        ("itself counted", _MASK.format(whole="(layer + 1) % every == 0", local="(i - j).abs() <= w")),
        ("causal still", _MASK.format(whole="(layer + 1) % every == 0", local="(i - j >= 0) & (i - j < w)")),
        ("has shrunk", _MASK.format(whole="(layer + 1) % every == 0", local="(i - j).abs() <= w // 2")),
        ("comes last", _MASK.format(whole="layer % every == 0", local="(i - j).abs() < w")),
        ("has a window", _MASK.format(whole="False", local="(i - j).abs() < w")),
        ("have lost their window", _MASK.format(whole="True", local="")),
    ],
    "a4_grouped": [
        ("in turn", _grouped("k, v = k.repeat(each, 1, 1), v.repeat(each, 1, 1)")),
        ("the first key head", _grouped("k, v = k[:1], v[:1]")),
        ("shared, not mixed", _grouped("k, v = k.mean(0, keepdim=True), v.mean(0, keepdim=True)")),
        ("head's size", _grouped(scale="q.shape[-1] ** 0.5")),
        ("square root that is meant", _grouped(scale="scalar")),
        ("not in force", _grouped(banned="torch.zeros_like(mask)")),
    ],
    "a4_token_labels": [
        ("on the first token", _labels(chosen="[:1]")),
        ("on each of their tokens", _labels(chosen="")),
        ("count as O", _labels(rest="numbers['O']")),
        ("may hold a space", _labels(held="start <= a < b <= end")),
        ("too far left", _labels(after="[1:] + [-100]")),
        ("share a letter", _labels(held="b == end and b > a", chosen="")),
    ],
    "a4_entity_f1": [
        (
            "count words",
            "def entity_f1(gold, predicted):\n    pairs = [p for a, b in zip(gold, predicted) for p in zip(a, b)]\n"
            "    return sum(a == b for a, b in pairs) / len(pairs)",
        ),
        (
            "count tags",
            "def entity_f1(gold, predicted):\n    pairs = [p for a, b in zip(gold, predicted) for p in zip(a, b)]\n"
            "    tp = sum(a == b != 'O' for a, b in pairs)\n    there = sum(a != 'O' for a, _ in pairs)\n"
            "    said = sum(b != 'O' for _, b in pairs)\n    return 2 * tp / max(there + said, 1)",
        ),
        (
            "have no kind",
            _SPANS + "def entity_f1(gold, predicted):\n"
            "    return f_of(*({(k, s) for k, x in enumerate(y) for s in spans_of(x, False)} for y in (gold, predicted)))",
        ),
        (
            "mean over sentences",
            _SPANS + "def entity_f1(gold, predicted):\n"
            "    each = [f_of(set(spans_of(a)), set(spans_of(b))) for a, b in zip(gold, predicted)]\n"
            "    return sum(each) / len(each)",
        ),
        (
            "lost their sentence",
            _SPANS + "def entity_f1(gold, predicted):\n"
            "    return f_of(*({s for x in y for s in spans_of(x)} for y in (gold, predicted)))",
        ),
        (
            "Yours is lost",
            _SPANS + "def entity_f1(gold, predicted):\n"
            "    return f_of(*({(k, s) for k, x in enumerate(y) for s in spans_of(x, strays=False)} for y in (gold, predicted)))",
        ),
        (
            "your precision",
            _SPANS + "def entity_f1(gold, predicted):\n"
            "    a, b = ({(k, s) for k, x in enumerate(y) for s in spans_of(x)} for y in (gold, predicted))\n"
            "    return len(a & b) / max(len(b), 1)",
        ),
    ],
    "a4_windows": [
        (
            "share `step` tokens",
            "def windows(n, room, step):\n    move = max(room - step, 1)\n"
            "    return [(a, min(a + room, n)) for a in range(0, max(n - room, 0) + move, move)]",
        ),
        ("is missing", "def windows(n, room, step):\n    return [(a, a + room) for a in range(0, n - room + 1, step)]"),
        ("nothing new", "def windows(n, room, step):\n    return [(a, min(a + room, n)) for a in range(0, n, step)]"),
        (
            "beyond the text",
            "def windows(n, room, step):\n    return [(a, a + room) for a in range(0, max(n - room, 0) + step, step)]",
        ),
        (
            "moved the last window back",
            "def windows(n, room, step):\n    starts = [*range(0, n - room, step), max(n - room, 0)]\n"
            "    return [(a, min(a + room, n)) for a in starts]",
        ),
        (
            "no token in common",
            "def windows(n, room, step):\n    return [(a, min(a + room, n)) for a in range(0, n, room)]",
        ),
    ],
    "a4_best_answer": [
        (
            "fit each other",
            """
def best_answer(text, rows, longest):
    offsets, start, end = rows[0]
    here = [t for t in range(len(offsets)) if offsets[t] is not None]
    i, j = max(here, key=lambda t: start[t]), max(here, key=lambda t: end[t])
    if start[-1] + end[-1] > start[i] + end[j]:
        return None
    a, b = offsets[i][0], offsets[j][1]
    return a + (text[a] == " "), b
""",
        ),
        (
            "begin elsewhere",
            """
def best_answer(text, rows, longest):
    offsets, start, end = rows[0]
    here = [t for t in range(len(offsets)) if offsets[t] is not None]
    i = max(here, key=lambda t: start[t])
    j = max((t for t in here if i <= t < i + longest), key=lambda t: end[t])
    if start[-1] + end[-1] > start[i] + end[j]:
        return None
    a, b = offsets[i][0], offsets[j][1]
    return a + (text[a] == " "), b
""",
        ),
        ("too long", _answer("i <= j <= i + longest")),
        ("a token short", _answer("i <= j < i + longest - 1")),
        ("as long as it likes", _answer("i <= j")),
        ("begins with a space", _answer(space="0")),
        ("those of tokens", _answer(first="i", last="j", space="0")),
        ("You always answer", _answer(none="False")),
        ("You say that there is no answer", _answer(none="True")),
        ("You return the words", _answer().replace("return a + (text[a] == ' '), b", "return text[a:b].strip()")),
        ("nothing beside them", _answer().replace("return a + (text[a] == ' '), b", "return best, a, b")),
        ("rightly says so", _answer(none="max(nothing) > best")),
    ],
    "a4_compare": [
        (
            "turned over",
            "def compare(one, other, seeds, texts):"
            + _compare().split(":", 1)[1].replace("one - other", "other - one"),
        ),
        ("Only your texts", _compare(gap="apart[:, t].mean()")),
        ("Only your seeds", _compare(gap="apart[s].mean()")),
        ("not drawn along", _compare(gap="one[s][:, t].mean() - other.mean()")),
        ("5 % on each side", _compare(tail="0.05")),
        ("one odd draw", _compare(tail="0.0")),
        ("observed one", _compare(mean="gaps.mean()")),
        ("larger mean", _compare(claim="'one' if apart.mean() > 0 else 'other'")),
        ("one end", _compare(claim="'one' if low > 0 else None")),
        ("is the string", _compare(claim="'one' if low > 0 else 'other' if high < 0 else 'none'")),
        ("begins at 0", _compare(claim="'one' if low >= 0 else 'other' if high <= 0 else None")),
    ],
}
