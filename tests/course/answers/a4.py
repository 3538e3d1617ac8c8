"""Answers to A4. RIGHT: a correct one beside the solution. WRONG: words of the message, and what to change in the solution."""

RIGHT = {
    "a4_counts": """
def count_entities(gold, predicted):
    def entities(tags):
        tags = [t if t[0] != "I" or (k and tags[k - 1][1:] == t[1:]) else "B" + t[1:] for k, t in enumerate(tags)]
        starts = [k for k, tag in enumerate(tags) if tag[0] == "B"]
        ends = [next((s for s in range(k + 1, len(tags)) if tags[s][0] != "I"), len(tags)) for k in starts]
        return [(k, stop, tags[k][2:]) for k, stop in zip(starts, ends)]

    counts = {}
    for a, b in zip(gold, predicted):
        a, b = entities(a), entities(b)
        for place, some in enumerate(([e for e in b if e in a], b, a)):
            for entity in some:
                counts.setdefault(entity[2], torch.zeros(3, dtype=torch.int64))[place] += 1
    return counts
""",
    "a4_faults": """
def faults(one, other):
    found = set()
    first = one[0]
    for run in one + other:
        found |= {name for name in ("steps", "sentences") if run[name] != first[name]}
        if sorted(run["tags"]) != sorted(first["tags"]):
            found.add("passages")
        if run["measured"] != run["mask"]:
            found.add("mask")
    if any(run["measured"] == second["measured"] for run in one for second in other):
        found.add("mask")
    seeds = [run["seed"] for run in one]
    if sorted(seeds) != sorted(run["seed"] for run in other) or any(seeds.count(seed) > 1 for seed in seeds):
        found.add("seeds")
    return tuple(found)
""",
    "a4_compare": """
def compare_arms(one, other, draws):
    def f1(counts):
        counts = counts.sum(-2).double()
        return (200 * counts[..., 0] / (counts[..., 1] + counts[..., 2])).mean(0)

    drawn = f1(one[:, draws]) - f1(other[:, draws])
    return torch.cat([torch.stack([f1(one), f1(other)]), drawn.quantile(torch.tensor([0.025, 0.975]).double())])
""",
    "a4_report": """
def report(runs, draws):
    def arm(mask):
        return [run for run in runs if run["mask"] == mask]

    counts = {mask: torch.stack([counts_of(run) for run in arm(mask)]) for mask in ("causal", "bidirectional")}
    c, b, low, high = compare_arms(counts["causal"], counts["bidirectional"], draws)
    wrong = faults(arm("causal"), arm("bidirectional"))
    claim = None if wrong or low * high <= 0 else "causal" if low > 0 else "bidirectional"
    f1 = {"causal": c, "bidirectional": b}
    return {"f1": f1, "difference": b - c, "low": -high, "high": -low, "faults": wrong, "claim": claim}
""",
    "a4_not_shown": """
def not_shown(fields):
    codes = ["texts", "steps", "seeds", "reason", "equal"]
    is_significant = fields["low"] * fields["high"] > 0
    return tuple(codes + ["significant"] * (not is_significant) + ["mask"] * (fields["claim"] is None))
""",
}

TAGGED = "true, guessed = entities(gold), entities(predicted)"
BOTH, F1 = "for run in both", "(200 * correct / (predicted + gold)).mean()"
DRAWN, CLAIM = "f1(one[:, draw]) - f1(other[:, draw])", '"bidirectional" if low > 0 else "causal" if high < 0 else None'
FIELDS = "return f1(one).item(), f1(other).item()"
SOME = "in enumerate((true & guessed, guessed, true))"

WRONG = {
    "a4_counts": [
        (
            "count words",
            *(TAGGED, "true, guessed = ({(k, i, t[2:]) for k, s in enumerate(x) for i, t in enumerate(s) if t != 'O'} "),
            *("\n    counts = {kind", "for x in (gold, predicted))\n    counts = {kind"),
        ),
        ("ignore the kind", "(true & guessed,", "([e for e in guessed if e[:3] in {t[:3] for t in true}],"),
        (
            "overlap is not enough",
            *("(true & guessed,", "([e for e in guessed if any(e[0] == t[0] and e[3] == t[3] and "),
            *("guessed, true)", "e[1] < t[2] and t[1] < e[2] for t in true)], guessed, true)"),
        ),
        ("lost their sentence", "found.add((number, ", "found.add((0, "),
        ("you leave it out", "found.add(", "tags[first][0] == 'B' and found.add("),
        ("at the end of a sentence", '[*tags, "O"]', "tags"),
        ("Your order", "guessed, true))", "true, guessed))"),
        ("is not in gold is missing", "in true | guessed}", "in true}", "in some:", "in some & true if 0 else [e for e in some if e[-1] in counts]:"),
        ("right after another one", 'tag == f"I-{tags[first][2:]}"', 'tag[2:] == tags[first][2:]'),
        ("of another kind", 'tag == f"I-{tags[first][2:]}"', 'tag[0] == "I"'),
    ],
    "a4_faults": [
        ("order of the runs", "sorted(run", "list(run"),
        ("only the first one", "for run in both}) > 1", "for run in (one[0], other[0])}) > 1"),
        ("What was measured", 'run["measured"] for run in arm', 'run["mask"] for run in arm', 'any(run["mask"] != run["measured"] for run in both)', "False"),
        ("Do you compare all", "[0] != seeds[1]", "[0] != seeds[1][:3]"),
        ("all faults", "return found", "return found[:1]"),
        ("another measured mask", 'any(run["mask"] != run["measured"] for run in both)', "False", "measured[0] & measured[1]", "one[0]['measured'] == other[0]['measured']"),
        ("keys of `tags`", 'frozenset(run["tags"])', 'str(run["tags"])'),
        ("not their names", 'frozenset(run["tags"])', 'len(run["tags"])'),
        ("All runs have the same mask", " or measured[0] & measured[1]", ""),
        ("in one arm only", "measured[0] & measured[1]", "measured[0] == measured[1]"),
        ("counted twice", "or len(set(seeds[0])) < len(seeds[0])", ""),
        ("single seed is not", "or len(set(seeds[0])) < len(seeds[0])", "or len(set(seeds[0])) < max(2, len(seeds[0]))"),
        ("`measured` with `mask`", 'any(run["mask"] != run["measured"] for run in both)', 'any(len(of) > 1 for of in measured)'),
        ("order of the passages", 'frozenset(run["tags"])', 'tuple(run["tags"])'),
        ("give a list", "return found", "return set(found)"),
    ],
    "a4_compare": [
        ("average the F1", "counts.sum(1).unbind(-1)", "counts.unbind(-1)"),
        ("add up the counts of the seeds", "counts.sum(1).unbind(-1)", "counts.sum((0, 1)).unbind(-1)"),
        ("`other` minus `one`", DRAWN, "f1(other[:, draw]) - f1(one[:, draw])"),
        ("for one arm only", DRAWN, "f1(one[:, draw]) - f1(other)"),
        ("Do both arms get the same passages", DRAWN, "f1(one[:, draw]) - f1(other[:, torch.randint(12, (12,))])"),
        ("2.5 %", "0.025, 0.975", "0.05, 0.95"),
        ("smallest to the largest", "0.025, 0.975", "0.0, 1.0"),
        ("is a share", "200 *", "2 *"),
        ("size of tensor", F1, F1[:-7], DRAWN, f"({DRAWN}).mean()", FIELDS, "return f1(one).mean().item(), f1(other).mean().item()"),
        ("not their difference", FIELDS, "return (f1(one) - f1(other)).item()"),
    ],
    "a4_report": [
        ("are exchanged", '"causal": causal, "bidirectional": bidirectional', '"causal": bidirectional, "bidirectional": causal'),
        ("difference and interval are", '"difference": bidirectional - causal', '"difference": causal - bidirectional', '"low": low, "high": high', '"low": -high, "high": -low'),
        ("Your difference is causal", '"difference": bidirectional - causal', '"difference": causal - bidirectional'),
        ("Your interval is of causal", '"low": low, "high": high', '"low": -high, "high": -low'),
        ("but the interval contains", CLAIM, '"bidirectional" if bidirectional > causal else "causal"'),
        ("comparison has a fault", "None if found else better", "better"),
        ("whole interval", '"causal" if high < 0 else None', "None"),
        ("Are exercises 1 to 3", "low, high = compare_arms(*counts, draws)", "low, high = compare_arms(*counts, draws[:9])"),
        ("two arms are exchanged", 'in ("bidirectional", "causal")]', 'in ("causal", "bidirectional")]'),
        ("None, not False", '"causal" if high < 0 else None', '"causal" if high < 0 else False', "None if found", "False if found"),
        ("with `faults`", '"faults": found', '"faults": []'),
    ],
    "a4_not_shown": [
        ("does not show that the masks", '"equal", ', ""),
        ("Only passages", '"seeds", ', ""),
        ("No run had more", '"steps", ', ""),
        ("newspaper", '"texts", ', ""),
        ("not why", ', "reason"', ""),
        ("only repeats", '"reason"]', '"reason", "measured"]'),
        ("interval contains 0: is", '["significant", "mask"]', '["mask"]'),
        ("interval excludes 0: is", '    if fields', '    codes += ["significant"] * (fields["low"] > 0)\n    if fields'),
        ("`faults` is empty", 'elif fields["faults"]', "elif False"),
        ("each code once", "return codes", "return codes * 2"),
    ],
}  # fmt: skip
