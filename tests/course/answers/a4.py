"""Answers to A4. RIGHT: a correct one beside the solution. WRONG: words of the message, and what to change in the solution."""

RIGHT = {
    "a4_layer_mask": """
def layer_mask(n, w, layer, every):
    reach = n if layer % every == every - 1 else w - 1
    return torch.ones(n, n).tril(reach).triu(-reach).bool()
""",
    "a4_grouped": """
def grouped_attention(q, k, v, mask, scalar):
    q = q.view(len(k), len(q) // len(k), *q.shape[1:])
    scores = torch.einsum("gend,gmd->genm", q, k) * scalar**-0.5
    weights = torch.where(mask, scores, -torch.inf).softmax(-1)
    return torch.einsum("genm,gmd->gend", weights, v).flatten(0, 1)
""",
    "a4_token_labels": """
def token_labels(offsets, spans, tags, numbers):
    labels = torch.full((len(offsets),), -100)
    places = torch.tensor(offsets)
    for (start, end), tag in zip(spans, tags):
        held = ((places[:, 0] < end) & (places[:, 1] > start)).nonzero()
        if len(held):
            labels[held[-1]] = numbers[tag]
    return labels
""",
    "a4_entity_f1": """
def entity_f1(gold, predicted):
    def entities(tags):
        tags = [t if t[0] != "I" or (k and tags[k - 1][1:] == t[1:]) else "B" + t[1:] for k, t in enumerate(tags)]
        starts = [k for k, tag in enumerate(tags) if tag[0] == "B"]
        ends = [next((s for s in range(k + 1, len(tags)) if tags[s][0] != "I"), len(tags)) for k in starts]
        return [(k, stop, tags[k][2:]) for k, stop in zip(starts, ends)]

    pairs = [(entities(a), entities(b)) for a, b in zip(gold, predicted)]
    hit = sum(entity in a for a, b in pairs for entity in b)
    return 2 * hit / (sum(len(a) + len(b) for a, b in pairs) or 1)
""",
    "a4_windows": """
def windows(n, room, step):
    starts = range(0, max(n - room, 0) + step, step)
    return [[a, min(a + room, n)] for a in starts]
""",
    "a4_best_answer": """
def best_answer(text, rows, longest):
    pairs = [
        (s[i] + e[j], o[i][0], o[j][1])
        for o, s, e in rows
        for i in range(len(o)) if o[i]
        for j in range(i, len(o)) if o[j] and j - i < longest
    ]
    score, a, b = sorted(pairs)[-1]
    lowest = sorted(s[-1] + e[-1] for _, s, e in rows)[0]
    return [a + (text[a] == " "), b] if score >= lowest else None
""",
    "a4_compare": """
def compare(one, other, seeds, texts):
    apart = one - other
    gaps = apart[seeds[:, :, None], texts[:, None, :]].mean((1, 2))
    low, high = torch.quantile(gaps, torch.tensor([0.025, 0.975], dtype=gaps.dtype))
    return apart.mean(), low, high, None if low <= 0 <= high else "one" if low > 0 else "other"
""",
}

SHARED = "k.repeat_interleave(each, dim=0), v.repeat_interleave(each, dim=0)"
LABEL, IN_WORD = "labels[held[-1]] = numbers[tag]", "a < end and start < b"
F1, TAGGED = "2 * len(there & said) / max(len(there) + len(said), 1)", "entities(gold), entities(predicted)"
OF_SENTENCE = "len([e for e in {} if e[0] == k])"
FIRST, CHARACTERS = "min(first + room, n)", "b - len(text[a:b].lstrip())"
CLAIM = '"one" if low > 0 else "other" if high < 0 else None'
BY_START = """
def best_answer(text, rows, longest):
    offsets, start, end = rows[0]
    here = [t for t in range(len(offsets)) if offsets[t] is not None]
    i = max(here, key=lambda t: start[t])
    j = max((t for t in here if i <= t < i + longest), key=lambda t: end[t])
    if start[-1] + end[-1] > start[i] + end[j]:
        return None
    a, b = offsets[i][0], offsets[j][1]
    return a + (text[a] == " "), b
"""

WRONG = {
    "a4_layer_mask": [
        ("itself counted", "< w", "<= w"),
        ("still causal", "(i - j).abs() < w", "(i >= j) & (i - j < w)"),
        ("has shrunk", "< w", "<= w // 2"),
        ("comes last", "(layer + 1) % every", "layer % every"),
        ("has a window", "(layer + 1) % every == 0", "False"),
        ("have lost their window", "(layer + 1) % every == 0", "True"),
    ],
    "a4_grouped": [
        ("in turn", "repeat_interleave(each, dim=0)", "repeat(each, 1, 1)"),
        ("the first key head", SHARED, "k[:1], v[:1]"),
        ("shared, not mixed", SHARED, "k.mean(0, keepdim=True), v.mean(0, keepdim=True)"),
        ("head's size", "scalar**0.5", "q.shape[-1] ** 0.5"),
        ("square root that is meant", "scalar**0.5", "scalar"),
        ("not in force", "~mask", "mask & False"),
    ],
    "a4_token_labels": [
        ("on the first token", "held[-1]", "held[0]"),
        ("on each of their tokens", LABEL, "labels[held[0] : held[-1] + 1] = [numbers[tag]] * len(held)"),
        ("count as O", "[-100]", "[0]"),
        ("may hold a space", IN_WORD, "start <= a < b <= end"),
        ("too far left", "return labels", "return labels[1:] + [-100]"),
        (
            "of one letter",
            LABEL,
            "labels[held[-1]] = numbers[tag]\n            for t in held:\n"
            "                labels[t] = numbers[tag] if offsets[t] == offsets[held[-1]] else -100",
        ),
    ],
    "a4_entity_f1": [
        (
            "count words",
            *(
                "    there, said =",
                "    pairs = [p for a, b in zip(gold, predicted) for p in zip(a, b)]\n    there, said =",
            ),
            *(F1, "sum(a == b for a, b in pairs) / len(pairs)"),
        ),
        (
            "count tags",
            TAGGED,
            "({(k, i, tag) for k, tags in enumerate(texts) for i, tag in enumerate(tags) if tag != 'O'} "
            "for texts in (gold, predicted))",
        ),
        ("have no kind", ", tags[first][2:]))", "))"),
        (
            "mean over sentences",
            F1,
            f"sum(2 * {OF_SENTENCE.format('there & said')} / max({OF_SENTENCE.format('[*there, *said]')}, 1) "
            "for k in range(len(gold))) / len(gold)",
        ),
        ("lost their sentence", "found.add((number, ", "found.add(("),
        ("Yours is lost", "found.add(", "tags[first][0] == 'B' and found.add("),
        ("your precision", "max(len(there) + len(said), 1)", "max(2 * len(said), 1)"),
        ("your recall", "max(len(there) + len(said), 1)", "max(2 * len(there), 1)"),
    ],
    "a4_windows": [
        ("share `step` tokens", "first += step", "first += max(room - step, 1)"),
        ("is missing", "return found", "return found[:-1]"),
        ("nothing new", "if first + room >= n", "if first + step >= n"),
        ("beyond the text", FIRST, "first + room"),
        ("moved the last window back", f"(first, {FIRST})", f"(max(min(first, n - room), 0), {FIRST})"),
        ("the one after it", FIRST, f"{FIRST} - 1"),
        ("no token in common", "first += step", "first += room"),
    ],
    "a4_best_answer": [
        ("fit each other", BY_START.replace("i <= t < i + longest", "True")),
        ("begin elsewhere", BY_START),
        ("too long", "min(i + longest,", "min(i + longest + 1,"),
        ("a token short", "min(i + longest,", "min(i + longest - 1,"),
        ("as long as it likes", "min(i + longest, len(offsets))", "len(offsets)"),
        ("begins with a space", CHARACTERS, "a"),
        ("those of tokens", "(offsets[i][0], offsets[j][1])", "(i, j)", CHARACTERS, "a"),
        ("You always answer", "if nothing > best", "if False"),
        ("you return none", "if nothing > best", "if True"),
        ("You return the words", f"{CHARACTERS}, b", "text[a:b].strip()"),
        ("nothing beside them", f"return {CHARACTERS}", f"return best, {CHARACTERS}"),
        ("rightly has none", "min(nothing,", "max(nothing,", 'None, float("inf")', 'None, float("-inf")'),
        ("its offset is None", "if offsets[i] is None", "if False"),
    ],
    "a4_compare": [
        ("turned over", "one - other", "other - one"),
        ("Only your texts", "apart[rows][:, columns]", "apart[:, columns]"),
        ("Only your seeds", "apart[rows][:, columns]", "apart[rows]"),
        ("not drawn along", "apart[rows][:, columns].mean()", "one[rows][:, columns].mean() - other.mean()"),
        ("5 % on each side", "0.025", "0.05", "0.975", "0.95"),
        ("one odd draw", "0.025", "0.0", "0.975", "1.0"),
        ("observed one", "apart.mean().item()", "gaps.mean().item()"),
        ("larger mean", CLAIM, '"one" if apart.mean() > 0 else "other"'),
        ("one end", CLAIM, '"one" if low > 0 else None'),
        ("is the string", "else None", 'else "none"'),
        ("Zero is inside: <", "low > 0", "low >= 0"),
    ],
}
