"""The report of a comparison of fusion methods in words: what the numbers say, and what they do not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from labkit.bench.effect_gaps import Told, points, sorted_out, verdict
from labkit.bench.fusion_quality import AVERAGE, SINGLE, UNMOVED

Gap = tuple[dict[str, str], dict[str, Any]]  # where it was measured, by name, and the difference
ORDER = ("concat", "isolate+restart", "fuse")  # as published, from worst to best


def words(found: Mapping[str, Any]) -> dict[str, list[str]]:
    """{"words": of natural paraphrases and of the whole, "template_words": of those that templates made}"""
    natural = [each for each in found["conditions"] if not each["templates"]]
    made = [each for each in found["conditions"] if each["templates"]]
    told = _paragraphs(natural) if natural else ["**Natural paraphrases** were not measured; see below."]
    template_words = []
    if made:
        names = ", ".join(dict.fromkeys(each["name"] for each in made))
        template_words = [
            f"**{names}:** the paraphrases were made by templates around one and the same wording. They say little "
            "about natural ones, and are counted nowhere above.",
            *_paragraphs(made),
        ]
    return {"words": [*told, _unknown(found), *_unfinished(found["unfinished"])], "template_words": template_words}


def markdown(found: Mapping[str, Any], forests: Mapping[bool, str], curves: Sequence[Sequence[str]]) -> str:
    """The whole report as one Markdown file.

    Args:
        forests: the figures of all differences, {whether of templates: file}. curves: the files of each condition.
    """
    parts = ["# What fusing paraphrases gives", "", *[f"{text}\n" for text in found["words"]]]
    parts += [f"![differences to the mean of single prompts]({forests[False]})", ""] if False in forests else []
    parts += [_how_to_read(), ""]
    drawn = list(zip(found["conditions"], curves, strict=True))
    for each, files in drawn:
        if not each["templates"]:
            parts += _section(each, files)
    if found["template_words"]:
        parts += ["# Made by templates", "", *[f"{text}\n" for text in found["template_words"]]]
        parts += [f"![differences to the mean of single prompts]({forests[True]})", ""] if True in forests else []
        for each, files in drawn:
            if each["templates"]:
                parts += _section(each, files)
    return "\n".join(parts).rstrip() + "\n"


# ---- in words ------------------------------------------------------------------------------------------------------


def _paragraphs(conditions: Sequence[dict]) -> list[str]:
    told = [_over_single(conditions), _others(conditions), *_against(conditions), _order(conditions)]
    told += [_wordings(conditions), _held(conditions), _more_text(conditions), _check(conditions), _chance(conditions)]
    return [text for text in told if text]


def _over_single(conditions: Sequence[dict]) -> str:
    gaps = _gaps(conditions, "fuse", "to_single")
    if not gaps:
        return "**Fusion over one prompt** was not measured: fuse is not finished, or not all of its single prompts."
    return f"**Fusion over one prompt** (the mean of the single prompts that it is made of): fuse {_sorted_out(gaps)}."


def _others(conditions: Sequence[dict]) -> str:
    names = dict.fromkeys(row["method"] for each in conditions for row in each["rows"] if "to_single" in row)
    told = [f"{name} {_counted(_gaps(conditions, name, 'to_single'))}" for name in names if name != "fuse"]
    return f"**Other methods over one prompt:** {'; '.join(told)}. The tables have each." if told else ""


def _sorted_out(gaps: Sequence[tuple[dict, dict]], *words: str) -> str:
    return sorted_out([Told(each, gap) for each, gap in gaps], *words)


def _against(conditions: Sequence[dict]) -> Iterator[str]:
    for other, gaps in (
        ("logit averaging, the one to beat", _gaps(conditions, "fuse", "to_average")),
        ("plain concatenation", _paired(conditions, "fuse", "concat")),
    ):
        told = f"fuse {_sorted_out(gaps, 'is better', 'is worse')}" if gaps else "not measured"
        yield f"**Fusion against {other}:** {told}."


def _order(conditions: Sequence[dict]) -> str:
    """The published order holds where both of its steps leave out zero, and is contradicted where one does below."""
    begin = f"**The published order, {' < '.join(ORDER)},**"
    found: dict[str, list[str]] = {}
    for each in conditions:
        steps: dict[int, list[dict]] = {}
        for pair in each["pairs"]:
            if (pair["other"], pair["one"]) in zip(ORDER, ORDER[1:], strict=False):
                steps.setdefault(pair["paraphrases"], []).append(pair["difference"])
        for n, gaps in steps.items():
            if len(gaps) < 2:
                continue
            kinds = [verdict(gap) for gap in gaps]
            kind = "found" if kinds == ["helps"] * 2 else "contradicted" if "harms" in kinds else "open"
            found.setdefault(kind, []).append(f"{_label(each, n)}: {' and '.join(map(points, gaps))}")
    if not found:
        return f"{begin} cannot be judged: not all three methods are finished for the same N."
    total = sum(map(len, found.values()))
    ends = {
        "found": "is found, both steps leaving out zero,", "contradicted": "is contradicted",
        "open": "is neither found nor contradicted",
    }  # fmt: skip
    told = [
        f"{ends[kind]} in {len(found[kind])} of {total} ({'; '.join(found[kind])})" for kind in ends if kind in found
    ]
    return f"{begin} {', '.join(told)}. The steps: isolate+restart less concat, and fuse less isolate+restart."


def _wordings(conditions: Sequence[dict]) -> str:
    """How many questions hang on their wording, beside fuse, of the largest N."""
    told = []
    for each in conditions:
        alone = {row["paraphrases"]: row for row in each["rows"] if row["method"] == SINGLE and row["paraphrases"] > 1}
        fused = {row["paraphrases"]: row for row in each["rows"] if row["method"] == "fuse"}
        if both := alone.keys() & fused.keys():
            n = max(both)
            row, fuse = alone[n], fused[n]["accuracy"]["mean"]
            told.append(
                f"{_label(each, n)}: {row['in_all']['mean']:.1f} of 100 questions are right in all wordings, "
                f"{row['in_any']['mean']:.1f} in at least one, {row['accuracy']['mean']:.1f} in the mean; "
                f"fuse {fuse:.1f}"
            )
    if not told:
        return ""
    return (
        f"**How much the wording of one prompt matters:** {'; '.join(told)}. The second number is a bound: who has one "
        "prompt does not know which wording it is."
    )


def _held(conditions: Sequence[dict]) -> str:
    """Questions that hold an answer: how many, and what fuse gives with and without them, of the largest N."""
    told = []
    for each in conditions:
        held = each["answer_in_wording"]
        if not held["ids"]:
            continue
        text = f"{each['name']}, {each['model']}: {len(held['ids']):,} of {held['of']:,} questions"
        gaps = [
            {row["paraphrases"]: row["to_single"] for row in rows if row["method"] == "fuse" and "to_single" in row}
            for rows in (held.get("rows", ()), each["rows"])
        ]
        if both := gaps[0].keys() & gaps[1].keys():
            n = max(both)
            text += f"; fuse less single, N = {n}, {points(gaps[0][n])} without them, {points(gaps[1][n])} with them"
        told.append(text)
    begin = "**An accepted answer within a wording that is read:**"
    return f"{begin} {'. '.join(told)}. Their tables come without them too." if told else f"{begin} in no question."


def _more_text(conditions: Sequence[dict]) -> str:
    """What copies of one paraphrase give in the methods that read them as more text."""
    gaps: dict[str, list[Gap]] = {}
    missing = []
    for each, one in _controls(conditions, check=False):
        if "to_first" in one:
            where = f"{each['name']}, {each['model']}, {one['method']} x {one['times']}"
            gaps.setdefault(one["method"], []).append(({"name": where}, one["to_first"]))
        else:
            missing.append(f"{each['name']}, {each['model']}")
    told = [f"{method} {_sorted_out(found)}" for method, found in gaps.items()]
    if missing:
        told.append(f"the first prompt alone is not finished in {', '.join(dict.fromkeys(missing))}")
    if not told:
        return "**What more text gives** was not measured: no method that reads copies as more text was asked them."
    return (
        "**What more text gives** (the first paraphrase, so many times, less that paraphrase alone; it says nothing "
        f"new): {'; '.join(told)}."
    )


def _check(conditions: Sequence[dict]) -> str:
    """Whether copies are one paraphrase in the methods where they are by identity; judged on these very questions."""
    told, broken = [], []
    for each, one in _controls(conditions, check=True):
        where = f"{each['name']}, {each['model']}, {one['method']} x {one['times']}"
        if "to_first" not in one:
            told.append(f"{where}: the first prompt alone is not finished")
            continue
        gap = one["to_first"] | one["to_first"].get("these_templates", {})
        told.append(f"{where}: the same answer in {one['alike']:,} of {one['of']:,}, {points(gap)}")
        if verdict(gap) != "open":
            broken.append(where)
    if not told:
        return "**An implementation check** (copies of one paraphrase against it alone) was not made."
    end = ""
    if broken:
        end = f" **This must not be:** copies change what is right in {'; '.join(broken)}, so its numbers mean nothing."
    return (
        f"**An implementation check** ({' and '.join(UNMOVED)} of copies of one paraphrase are that prompt by "
        f"identity, up to rounding, so this says nothing of what they gain): {'; '.join(told)}.{end}"
    )


def _controls(conditions: Sequence[dict], check: bool) -> Iterator[tuple[dict, dict]]:
    return ((each, one) for each in conditions for one in each["control"] if one["check"] is check)


def _chance(conditions: Sequence[dict]) -> str:
    rows = [row for each in conditions for row in each["rows"]]
    gaps = [row[key] for row in rows for key in ("to_single", "to_average") if key in row]
    gaps += [pair["difference"] for each in conditions for pair in each["pairs"]]
    gaps += [one["to_first"] for _, one in _controls(conditions, check=False) if "to_first" in one]
    if not gaps:
        return ""
    clear = sum(verdict(gap) != "open" for gap in gaps)
    return (
        f"**Chance:** of {len(gaps)} comparisons {clear} leave out zero; if nothing differed, about "
        f"{0.05 * len(gaps):.1f} would."
    )


def _unknown(found: Mapping[str, Any]) -> str:
    conditions = found["conditions"]
    models, sets = (", ".join(dict.fromkeys(each[key] for each in conditions)) for key in ("model", "name"))
    shots = sorted({each["settings"]["few_shot"] for each in conditions})
    text = (
        f"**Not known:** other models than {models}; other sets than {sets}; other prompts than this one with "
        f"{' or '.join(map(str, shots))} examples, drawn once; answers longer than "
        f"{max(each['settings']['max_new_tokens'] for each in conditions)} tokens. No interval is over the "
        "examples: with others in the prompt all numbers may move together."
    )
    if mixed := [f"{each['name']}, {each['model']}" for each in conditions if _is_mixed(each)]:
        text += f" Versions or devices differ among the files of {'; '.join(mixed)}."
    return text


def _unfinished(cells: Sequence[dict]) -> list[str]:
    if not cells:
        return []
    told = [
        f"{each['name']}, {each['model']}, {each['method']}, {each['reads']}"
        + (f" ({each['kept']:,} answers kept)" if each["kept"] else "")
        + (f" (failed: {each['reason']})" if each["reason"] else "")
        for each in cells
    ]
    return [f"**Unfinished:** {len(cells)} cells, which enter no number: {'; '.join(told)}."]


def _counted(gaps: Sequence[Gap]) -> str:
    """helps in 2 of 4, harms in 1, open in 1 (from -6.9 to +6.2)"""
    kinds = [verdict(gap) for _, gap in gaps]
    told = [f"{kind} in {kinds.count(kind)}" for kind in ("helps", "harms", "open") if kind in kinds]
    told[0] += f" of {len(gaps)}"
    means = [gap["mean"] for _, gap in gaps]
    span = f"from {min(means):+.1f} to {max(means):+.1f}" if len(means) > 1 else f"{means[0]:+.1f}"
    return f"{', '.join(told)} ({span})"


def _is_mixed(each: dict[str, Any]) -> bool:
    return len(each["versions"]) > 1 or len(each["loaded"]) > 1


def _gaps(conditions: Sequence[dict], method: str, key: str) -> list[Gap]:
    """(where, difference) wherever the method has one."""
    return [
        ({"name": _label(each, row["paraphrases"])}, row[key])
        for each in conditions
        for row in each["rows"]
        if row["method"] == method and key in row
    ]


def _paired(conditions: Sequence[dict], one: str, other: str) -> list[Gap]:
    return [
        ({"name": _label(each, pair["paraphrases"])}, pair["difference"])
        for each in conditions
        for pair in each["pairs"]
        if (pair["one"], pair["other"]) == (one, other)
    ]


def _label(each: dict[str, Any], n: int) -> str:
    return f"{each['name']}, {each['model']}, N = {n}"


# ---- tables --------------------------------------------------------------------------------------------------------


def _how_to_read() -> str:
    return (
        "Accuracies are in points; differences are paired by question, and their n, where it is not that of the row, "
        "stands beside them. Intervals (95 %) are a bootstrap that draws relations, and then questions within them; "
        "where a set has no relations, questions. *these templates only* draws questions alone: it holds for the "
        "relations and wordings that were asked, and not for others, and so does McNemar's p. *minus single* is the "
        "difference to the mean of the N single prompts that the method reads together, *minus logit-average* to logit "
        "averaging of the same N; p is McNemar's exact test of the latter. *mean of relations* counts each relation "
        "alike, *minus single, by relation* is the difference of such means. Seconds are per question, loading not "
        "counted; of single, per prompt: the median of a run that may have shared the machine, with quartiles. They "
        "are no measure of speed; benchmarks/fusion_latency.py is."
    )


def _section(each: dict[str, Any], curves: Sequence[str]) -> list[str]:
    settings, loaded = each["settings"], each["loaded"][0]
    n = max((row["n"] for row in each["rows"]), default=0)
    relations = f" of {each['relations']} relations" if each["relations"] else ""
    left_out = f"; {each['left_out']:,} with fewer are left out" if each["left_out"] else ""
    parts = [
        f"## {each['name']}: {each['model']}",
        "",
        f"{n:,} of {each['questions']:,} questions{relations} with at least {settings['at_least']} paraphrases"
        f"{left_out}; their order is {settings['order']}; {settings['few_shot']} examples in the prompt; greedy, "
        f"{settings['max_new_tokens']} tokens at most; {loaded['dtype']} on {loaded['device']}, "
        f"{settings['batch_size']} questions at once, engine {settings['engine']}.",
        "",
    ]
    parts += _table(each["rows"])
    if each["places"]:
        listed = ", ".join(f"{one['place']}: {one['accuracy']['mean']:.1f}" for one in each["places"])
        parts += [f"One prompt alone, by its place in that order, so they differ by chance: {listed}.", ""]
    if each["pairs"]:
        parts += [f"Pairs: {'; '.join(map(_pair, each['pairs']))}.", ""]
    parts += _without(each["answer_in_wording"])
    for curve, file in zip(each["curves"], curves, strict=True):
        parts += [f"![accuracy over N, n = {curve['n']:,}]({file})", ""]
    return parts


def _pair(pair: dict[str, Any]) -> str:
    gap = pair["difference"]
    told = f"{pair['one']} less {pair['other']}, N = {pair['paraphrases']}: {points(gap)}"
    if "these_templates" not in gap:
        return f"{told}, p = {gap['p']:.2g}"
    return f"{told}; for these templates only {_range(gap['these_templates'])}, p = {gap['p']:.2g}"


def _without(held: dict[str, Any]) -> list[str]:
    """The table again, without the questions that hold an accepted answer; none where there are no such questions."""
    if not held["ids"]:
        return []
    count = f"{len(held['ids']):,} of {held['of']:,} questions have an accepted answer within a wording that is read"
    if "rows" not in held:
        return [f"{count}, so nothing is left without them.", ""]
    parts = [f"{count}. Without them:", "", *_table(held["rows"])]
    return parts + ([f"Pairs: {'; '.join(map(_pair, held['pairs']))}.", ""] if held["pairs"] else [])


def _table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """One row per method and N; a column that no row fills is left out."""
    p = "p (these templates)" if any("these_templates" in row.get("to_average", {}) for row in rows) else "p"
    columns = {
        "method": lambda row: "single, mean" if row["method"] == SINGLE and row["paraphrases"] > 1 else row["method"],
        "N": lambda row: str(row["paraphrases"]),
        "n": lambda row: f"{row['n']:,}",
        "accuracy": lambda row: _interval(row["accuracy"]),
        "minus single": lambda row: _gap(row, "to_single"),
        "minus single, these templates only": lambda row: _narrow(row, "to_single"),
        f"minus {AVERAGE}": lambda row: _gap(row, "to_average"),
        f"minus {AVERAGE}, these templates only": lambda row: _narrow(row, "to_average"),
        p: lambda row: f"{row['to_average']['p']:.2g}" if "to_average" in row else "",
        "mean of relations": lambda row: _interval(row["macro"]) if "macro" in row else "",
        "minus single, by relation": lambda row: _gap(row, "macro_to_single"),
        "lemmatised": lambda row: _interval(row["lemmatised"]) if "lemmatised" in row else "",
        "s per question": lambda row: _spread(row["seconds"]),
    }
    cells = {name: [cell(row) for row in rows] for name, cell in columns.items()}
    kept = [name for name, column in cells.items() if any(column)]
    lines = [[cells[name][number] for name in kept] for number in range(len(rows))]
    ruler = "|---|" + "---:|" * (len(kept) - 1)
    return [f"| {' | '.join(kept)} |", ruler, *(f"| {' | '.join(line)} |" for line in lines), ""]


def _interval(found: dict[str, Any]) -> str:
    return f"{found['mean']:.1f} {_range(found)}"


def _gap(row: dict[str, Any], key: str) -> str:
    if key not in row:
        return ""
    n = row[key]["n"]
    return points(row[key]) + ("" if n == row["n"] else f" (n = {n:,})")


def _narrow(row: dict[str, Any], key: str) -> str:
    found = row.get(key, {}).get("these_templates")
    return _range(found) if found else ""


def _range(ends: dict[str, float]) -> str:
    return f"[{ends['low']:.1f}, {ends['high']:.1f}]"


def _spread(seconds: dict[str, float]) -> str:
    return f"{seconds['median']:.3g} [{seconds['low']:.3g}, {seconds['high']:.3g}]"
