"""The report of a comparison of fusion methods in words: what the numbers say, and what they do not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from labkit.bench.effect_words import points, sorted_out, verdict
from labkit.bench.fusion_quality import AVERAGE, SINGLE

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
    told += [_best(conditions), _control(conditions), _chance(conditions)]
    return [text for text in told if text]


def _over_single(conditions: Sequence[dict]) -> str:
    gaps = _gaps(conditions, "fuse", "to_single")
    if not gaps:
        return "**Fusion over one prompt** was not measured: fuse is not finished, or not all of its single prompts."
    return f"**Fusion over one prompt** (the mean of the single prompts that it is made of): fuse {sorted_out(gaps)}."


def _others(conditions: Sequence[dict]) -> str:
    names = dict.fromkeys(row["method"] for each in conditions for row in each["rows"] if "to_single" in row)
    told = [f"{name} {_counted(_gaps(conditions, name, 'to_single'))}" for name in names if name != "fuse"]
    return f"**Other methods over one prompt:** {'; '.join(told)}. The tables have each." if told else ""


def _against(conditions: Sequence[dict]) -> Iterator[str]:
    for other, gaps in (
        ("logit averaging, the one to beat", _gaps(conditions, "fuse", "to_average")),
        ("plain concatenation", _paired(conditions, "fuse", "concat")),
    ):
        told = f"fuse {sorted_out(gaps, 'is better', 'is worse')}" if gaps else "not measured"
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


def _best(conditions: Sequence[dict]) -> str:
    """The best single prompt beside fuse, of the largest N."""
    told = []
    for each in conditions:
        alone = {row["paraphrases"]: row for row in each["rows"] if row["method"] == SINGLE and row["paraphrases"] > 1}
        fused = {row["paraphrases"]: row for row in each["rows"] if row["method"] == "fuse"}
        if both := alone.keys() & fused.keys():
            n = max(both)
            row, fuse = alone[n], fused[n]["accuracy"]["mean"]
            told.append(
                f"{_label(each, n)}: from {row['worst']['accuracy']:.1f} (place {row['worst']['place']}) to "
                f"{row['best']['accuracy']:.1f} (place {row['best']['place']}), mean {row['accuracy']['mean']:.1f}, "
                f"fuse {fuse:.1f}"
            )
    if not told:
        return ""
    return (
        f"**How much the choice of one prompt matters:** {'; '.join(told)}. The best place is chosen on the same "
        "questions, so it flatters: who has one prompt does not know which it is."
    )


def _control(conditions: Sequence[dict]) -> str:
    told, broken, most = [], [], 0.0
    for each in conditions:
        for one in each["control"]:
            where = f"{each['name']}, {each['model']}, {one['method']} x {one['times']}"
            if "alike" not in one:
                told.append(f"{where}: the first prompt alone is not finished")
                continue
            told.append(f"{where}: the same answer in {one['alike']:,} of {one['of']:,}, {points(one['to_first'])}")
            most = max(most, -one["to_first"]["low"], one["to_first"]["high"])
            if verdict(one["to_first"]) != "open":
                broken.append(where)
    if not told:
        return "**The repeat control** was not measured."
    end = f"So at most {most:.1f} points of what fusion gains come from reading more text." if most else ""
    if broken:
        end = f"**This must not be:** copies change what is right in {'; '.join(broken)}, so its numbers mean nothing."
    return (
        "**The repeat control** (one paraphrase, so many times, against that prompt alone; it must change nothing but "
        f"by rounding): {'; '.join(told)}. {end}".rstrip()
    )


def _chance(conditions: Sequence[dict]) -> str:
    rows = [row for each in conditions for row in each["rows"]]
    gaps = [row[key] for row in rows for key in ("to_single", "to_average") if key in row]
    gaps += [pair["difference"] for each in conditions for pair in each["pairs"]]
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
        f"{max(each['settings']['max_new_tokens'] for each in conditions)} tokens. Intervals are over questions: with "
        "other examples in the prompt all numbers may move together."
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
        "Accuracies are in points, with 95 % intervals from a bootstrap over questions; differences are paired by "
        "question, and their n, where it is not that of the row, stands beside them. *minus single* is the difference "
        "to the mean of the N single prompts that the method reads together, *minus logit-average* to logit averaging "
        "of the same N; p is McNemar's exact test of the latter. *mean of relations* counts each relation alike, "
        "*minus single, by relation* is the difference of such means; their intervals draw relations, then questions. "
        "Seconds are per question, loading not counted; of single, per prompt."
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
        f"{left_out}; {settings['few_shot']} examples in the prompt; greedy, {settings['max_new_tokens']} tokens at "
        f"most; {loaded['dtype']} on {loaded['device']}, {settings['batch_size']} questions at once, engine "
        f"{settings['engine']}.",
        "",
    ]
    parts += _table(each)
    if each["places"]:
        listed = ", ".join(f"{one['place']}: {one['accuracy']['mean']:.1f}" for one in each["places"])
        parts += [f"One prompt alone, by its place (0 is the first): {listed}.", ""]
    if each["pairs"]:
        listed = "; ".join(
            f"{p['one']} less {p['other']}, N = {p['paraphrases']}: {points(p['difference'])}, "
            f"p = {p['difference']['p']:.2g}"
            for p in each["pairs"]
        )
        parts += [f"Pairs: {listed}.", ""]
    for curve, file in zip(each["curves"], curves, strict=True):
        parts += [f"![accuracy over N, n = {curve['n']:,}]({file})", ""]
    return parts


def _table(each: dict[str, Any]) -> list[str]:
    """One row per method and N; a column that no row fills is left out."""
    columns = {
        "method": lambda row: "single, mean" if row["method"] == SINGLE and row["paraphrases"] > 1 else row["method"],
        "N": lambda row: str(row["paraphrases"]),
        "n": lambda row: f"{row['n']:,}",
        "accuracy": lambda row: _interval(row["accuracy"]),
        "minus single": lambda row: _gap(row, "to_single"),
        f"minus {AVERAGE}": lambda row: _gap(row, "to_average"),
        "p": lambda row: f"{row['to_average']['p']:.2g}" if "to_average" in row else "",
        "mean of relations": lambda row: _interval(row["macro"]) if "macro" in row else "",
        "minus single, by relation": lambda row: _gap(row, "macro_to_single"),
        "lemmatised": lambda row: _interval(row["lemmatised"]) if "lemmatised" in row else "",
        "s per question": lambda row: f"{row['seconds']:.3g}",
    }
    cells = {name: [cell(row) for row in each["rows"]] for name, cell in columns.items()}
    kept = [name for name, column in cells.items() if any(column)]
    lines = [[cells[name][number] for name in kept] for number in range(len(each["rows"]))]
    ruler = "|---|" + "---:|" * (len(kept) - 1)
    return [f"| {' | '.join(kept)} |", ruler, *(f"| {' | '.join(line)} |" for line in lines), ""]


def _interval(found: dict[str, Any]) -> str:
    return f"{found['mean']:.1f} [{found['low']:.1f}, {found['high']:.1f}]"


def _gap(row: dict[str, Any], key: str) -> str:
    if key not in row:
        return ""
    n = row[key]["n"]
    return points(row[key]) + ("" if n == row["n"] else f" (n = {n:,})")
