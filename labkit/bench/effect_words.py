"""The report of a comparison in words: what the numbers say, and what they do not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from labkit.bench.arms import ADAPTED, REFERENCE, arm
from labkit.bench.effect_gaps import (
    NOTHING,
    Told,
    bullets,
    counted,
    differences,
    halves,
    longest,
    pairs_of,
    points,
    sorted_out,
    verdict,
)  # fmt: skip
from labkit.bench.effect_limits import still_learning, unknown
from labkit.bench.effect_names import agree, named_apart, of, settings_apart
from labkit.bench.effect_series_words import along

ARMS_IN_SHORT = ("bidirectional", "repeated")
CLAIM = 5.0  # points: "bidirectional attention gives +5 to 10 %", found in many READMEs, and without a source


def paragraphs(found: dict[str, Any]) -> list[str]:
    """When the mask helps and by how much, what the controls say, what is not known; from the numbers alone."""
    conditions = named_apart(found["conditions"])
    told = [*_in_short(conditions), _removed(conditions), *_unlearned(conditions), *_uneven(conditions)]
    controls = (_repeated(conditions), *_adapted(conditions), *_encoders(conditions), _others(conditions))
    told += [text for text in controls if text]
    told += along(conditions, found.get("orders", ()), found.get("budgets", ()))
    told += [text for text in (_diagnostic(conditions), _claim(conditions)) if text]
    return [*told, unknown(conditions, found["curves"]), *_unfinished(found.get("unfinished", ()), conditions)]


def _in_short(conditions: Sequence[dict]) -> list[str]:
    """When does the mask help, by how much, what does the control say, what is not known: one plain paragraph.

    And one each, where there is something to tell, of filling gaps first, of few examples, and of the set that was
    made for it.
    """
    conditions = [each for each in conditions if _has_interval(each)]
    if not conditions:
        return []
    made, text = ([each for each in conditions if _was_made_for_it(each) is is_made] for is_made in (True, False))
    models = sorted({each["model"] for each in conditions})
    known = [each for name in ARMS_IN_SHORT for each in differences(conditions, name) if each.gap["low"] is not None]
    counting = longest(known)
    bounds = (
        f"This is of {' and '.join(models)} alone{still_learning(_with_their_causal(counting))}: whether it holds for "
        "other models, and for longer training, is not known."
    )
    once = ""
    if len(counting) < len(known):
        once = "Of a set that was learned for shorter and for longer, the longest of each arm counts. "
    told = [f"**In short.** A model {_compared(text or made, ' conditions')} {once}{bounds}"]
    if filled := _filled(text or made):
        told.append(f"**Filling gaps first, in short.** {filled}")
    if few := [line for each in conditions if (line := _with_few(each))]:
        told.append(f"**With few examples, in short.** {' '.join(few)}")
    if made and text:
        inside = [_compared(made, " conditions"), _filled(made)]
        apart = "on Which way round, word by word, where what follows decides half of it by design, a model"
        told.append(f"**Counted apart, as it was made for it:** {apart} {' '.join(inside).strip()}")
    return told


def _with_their_causal(told: Sequence[Told]) -> list[dict[str, Any]]:
    """The arms that these are of, and the causal ones that they are compared with, each once."""
    wanted = {(id(each.condition), name): each.condition for each in told for name in (REFERENCE, each.arm)}
    return [one for (_, name), each in wanted.items() for one in each["arms"] if one["name"] == name]


def _has_interval(condition: dict[str, Any]) -> bool:
    """Whether the difference of the unmasked model is known with its interval."""
    return any(each.gap["low"] is not None for each in differences([condition], "bidirectional"))


def _compared(conditions: Sequence[dict], things: str) -> str:
    """Of the unmasked model, whose sentence goes on here; of the control; of both against each other."""
    removed = _did(differences(conditions, "bidirectional"), things)
    told = [f"whose mask was removed, and nothing else done, {removed}."]
    if twice := differences(conditions, "repeated"):
        told.append(f"One that kept its mask and read the input twice {_did(twice)}.")
    if both := pairs_of(conditions, "bidirectional", "repeated"):
        told.append(f"Set against each other, the unmasked one {counted(both, '', 'was better', 'was worse')}.")
    return " ".join(told)


def _filled(conditions: Sequence[dict]) -> str:
    """What filling gaps before the task gives an unmasked model; "" if no model has done so."""
    most = _with_most_steps(conditions)
    repaired = [each for one, kind in most for each in pairs_of([one], kind, "bidirectional")]
    if not repaired:
        return ""
    did = counted(repaired, "", "was better for it", "was worse for it")
    told = f"An unmasked model that filled gaps before the task {did}"
    if both := [each for one, kind in most for each in pairs_of([one], kind, "repeated")]:
        told += f"; set against reading twice, it {counted(both, '', 'was better', 'was worse')}"
    return f"{told}."


def _with_most_steps(conditions: Sequence[dict]) -> list[tuple[dict[str, Any], str]]:
    """(condition, arm) of each objective of adaptation: of several numbers of steps the most, as they are one thing."""
    found = []
    for each in conditions:
        for kind in ADAPTED:
            names = [one["name"] for one in each["arms"] if one["name"].startswith(f"{kind}:") and "difference" in one]
            found += [(each, max(names, key=lambda name: arm(name).steps))] if names else []
    return found


def _was_made_for_it(condition: dict[str, Any]) -> bool:
    """Whether it is Which way round word by word, where a causal model has to lose: it says nothing of other texts."""
    return "diagnostic" in condition


def _with_few(condition: dict[str, Any]) -> str:
    """What the number of training examples changes, where it is shown to: with the fewest, and with all."""
    if not condition.get("sizes"):
        return ""
    few, whole = condition["sizes"][0], condition["sizes"][-1]
    open_ = few["arms"].get("bidirectional", {})
    if "growth" not in open_ or verdict(open_["growth"]) == "open":
        return ""
    text = (
        f"On {condition['name']}, at the rates of the full set, the difference of the unmasked one is, with "
        f"{few['size']:,} examples, "
        f"{points(open_['difference'])}; with {whole['size']:,}, {points(whole['arms']['bidirectional']['difference'])}"
    )
    repaired = [
        pair
        for pair in few.get("pairs", ())
        if pair["other"] == "bidirectional" and verdict(pair["difference"]) != "open"
    ]
    for pair in sorted(repaired, key=lambda pair: arm(pair["one"]).steps)[:1]:  # the fewest steps that are shown to
        text += f"; {pair['one']} less bidirectional, with {few['size']:,}, {points(pair['difference'])}"
    return text + "."


def _did(told: Sequence[Told], things: str = "") -> str:
    return counted(told, things, "beat the causal one", "lost to it")


def unit(conditions: Sequence[dict[str, Any]]) -> str:
    """Of the differences of these conditions: points of F1, points of accuracy, or what both are."""
    metrics = {"F1" if each["metric"] == "f1" else each["metric"] for each in conditions}
    return f"points of {metrics.pop()}" if len(metrics) == 1 else "points"


def _removed(conditions: Sequence[dict]) -> str:
    gaps = differences(conditions, "bidirectional")
    if not gaps:
        return f"**Removing the mask** was not measured: the arm bidirectional {NOTHING}."
    text = f"**Removing the mask, and nothing else,** {sorted_out(gaps)}."
    for each in conditions:
        if both := halves(each, "bidirectional"):
            told = "; ".join(f"where {name} it {_verb(gap)} ({points(gap)})" for name, gap in both)
            text += f" {each['name']} is two sets in one: {told}."
    return text


def _verb(gap: dict[str, Any]) -> str:
    return {"open": "shows no clear difference"}.get(verdict(gap), verdict(gap))


def learned(condition: dict[str, Any]) -> bool:
    """Whether some arm is shown to be better than everything that needs no model."""
    return any(one["learned"] for one in condition["arms"])


def _unlearned(conditions: Sequence[dict]) -> list[str]:
    told = []
    if names := [each["name"] for each in conditions if not learned(each)]:
        told.append(
            f"**Not learned:** in {', '.join(names)} no arm is shown to be better than a baseline that needs no model. "
            "Differences there are between models that fail, and say nothing of the mask."
        )
    below = [
        f"{one['name']} on {each['name']} ({_score(one)}, baseline {max(each['baselines'].values()):.1f})"
        for each in conditions
        if learned(each)
        for one in each["arms"]
        if not one["learned"]
    ]
    if below:
        lead = (
            "**Not shown to be better than what needs no model:** these have not learned the task at this budget, and "
            "their gap says that they did not get started, not what the mask is worth to a model that has."
        )
        told.append(bullets(lead, below))
    return told


def _score(one: dict[str, Any]) -> str:
    ends = "" if one["low"] is None else f" [{one['low']:.1f}, {one['high']:.1f}]"
    return f"{one['mean']:.1f}{ends}"


def _uneven(conditions: Sequence[dict]) -> list[str]:
    """Arms that had fewer rates to choose from than the others."""
    failed = [
        f"{one['name']} on {each['name']}, rate {rate} ({reason})"
        for each in conditions
        for one in each["arms"]
        for rate, reason in one["failed_rates"].items()
    ]
    return [f"**A smaller grid than the others:** {'; '.join(failed)}."] if failed else []


def _unfinished(found: Sequence[dict], conditions: Sequence[dict]) -> list[str]:
    told = []
    others = [each for each in conditions if not any(of(each) == of(one) and agree(each, one) for one in found)]
    for each, apart in zip(found, settings_apart([*found, *others]), strict=False):
        model = f" ({each['model']}, {each['method']})" if "model" in each else ""
        text = f"{each['name']}{model}{apart}, {each['done']} of {each['planned']} runs"
        if each["without"]:
            text += f" (none of {', '.join(each['without'])}"
            text += "; so nothing of it can be compared)" if REFERENCE in each["without"] else ")"
        told.append(text)
    return [f"**Unfinished:** {'; '.join(told)}."] if told else []


def _repeated(conditions: Sequence[dict]) -> str:
    gaps = differences(conditions, "repeated")
    if not gaps:
        return ""
    text = f"**The control: mask left in place, input read twice.** It {sorted_out(gaps)}."
    if against := pairs_of(conditions, "bidirectional", "repeated"):
        text += f" Against it, the unmasked model {sorted_out(against, 'is better', 'is worse')}."
    return text


def _adapted(conditions: Sequence[dict]) -> list[str]:
    """A paragraph for each objective and number of steps, with what it is set against below it."""
    names = {one["name"] for each in conditions for one in each["arms"] if one["name"].startswith(("mntp:", "mlm:"))}
    told = []
    for name in sorted(names, key=lambda each: (each.partition(":")[0], int(each.partition(":")[2]))):
        objective, _, steps = name.partition(":")
        lead = f"**After {steps} steps of {objective.upper()}** the unmasked model "
        against = {
            "the causal model with as many steps of next-token prediction": f"next:{steps}",
            "as many steps of MNTP": f"mntp:{steps}",
            "the unmasked model without these steps": "bidirectional",
        }
        items = [
            f"against {what} it {sorted_out(gaps, 'is better', 'is worse')}"
            for what, other in against.items()
            if (gaps := pairs_of(conditions, name, other))
        ]
        items += _beyond(conditions, name)
        told.append(bullets(f"{lead}{sorted_out(differences(conditions, name))}.", items))
    return told


def _beyond(conditions: Sequence[dict], name: str) -> list[str]:
    """How much of the difference to the control is not that of the mask alone."""
    told = [
        f"{each['name']} {points(pair['beyond'])}"
        for each in conditions
        for pair in each["pairs"]
        if pair["one"] == name and "beyond" in pair
    ]
    what = "what the steps add to the unmasked model, less what the control's add to the causal one"
    return [f"beyond the mask alone ({what}): {'; '.join(told)}"] if told else []


def _encoders(conditions: Sequence[dict]) -> list[str]:
    """A paragraph for each model that was made bidirectional, with what it is set against below it."""
    names = dict.fromkeys(one["name"] for each in conditions for one in each["arms"] if _is_encoder(one["name"]))
    told = []
    for name in names:
        against = {"the unmasked model": "bidirectional", "the one that reads twice": "repeated"}
        items = [
            f"against {what} it {sorted_out(gaps, 'is better', 'is worse')}"
            for what, other in against.items()
            if (gaps := pairs_of(conditions, name, other))
        ]
        lead = (
            f"**A model that was made bidirectional, {name.partition(':')[2]},** trained with the same rows, steps and "
            "grid of rates. It has other weights, made from other texts, so it is a mark for how far there is to go, "
            f"and no control for the mask. Against the causal one it "
            f"{sorted_out(differences(conditions, name), 'is better', 'is worse')}."
        )
        told.append(bullets(lead, items))
    return told


def _is_encoder(name: str) -> bool:
    return arm(name).mask == "encoder"


def _others(conditions: Sequence[dict]) -> str:
    names = dict.fromkeys(one["name"] for each in conditions for one in each["arms"])
    told = [
        f"{name} {sorted_out(differences(conditions, name))}"
        for name in names
        if name not in (REFERENCE, "bidirectional", "repeated")
        and name.partition(":")[0] not in ADAPTED
        and not _is_encoder(name)
    ]
    return bullets("**Other arms.**", told) if told else ""


def _diagnostic(conditions: Sequence[dict]) -> str:
    those = [each for each in conditions if "diagnostic" in each]
    told = []
    for each in those:
        of = f" on {each['name']}" if len(those) > 1 else ""
        told += [_over_the_ceiling(f"{name}{of}", halves["after"]) for name, halves in each["diagnostic"].items()]
    if not told:
        return ""
    return bullets(
        "**Sanity check** (Which way round, the names that only what follows can tell; a model that has not seen it is "
        "right on one of three at most), right by seed:",
        told,
    )


def _over_the_ceiling(name: str, after: dict[str, Any]) -> str:
    right = ", ".join(str(n) for n in after["right"])
    runs = sum(n > after["ceiling"] for n in after["right"])
    triples = f"{after['triples_over']} of {after['ceiling'] * len(after['right'])} triples"
    return (
        f"{name} {right} of {after['of']} (more than {after['ceiling']} in {runs} of {len(after['right'])} runs, "
        f"over one of three in {triples})"
    )


def _claim(conditions: Sequence[dict]) -> str:
    text = [each for each in conditions if not _was_made_for_it(each)]
    known = [each for each in text if _both_learned(each)]
    left_out = [each["name"] for each in text if not _both_learned(each)]
    gaps = [each.gap for each in longest(differences(known, "bidirectional"))]
    if not gaps:
        return ""
    below, above = sum(gap["high"] < CLAIM for gap in gaps), sum(gap["low"] >= CLAIM for gap in gaps)
    told = (
        f"**The common claim, +{CLAIM:.0f} to {2 * CLAIM:.0f} points from removing the mask:** of {len(gaps)} "
        f"conditions with an interval it is ruled out at this budget in {below}, borne out in {above}, and open in "
        f"{len(gaps) - below - above}."
    )
    told += f" Left out, as one of the two has not learned: {', '.join(left_out)}." if left_out else ""
    made = ", ".join(each["name"] for each in conditions if _was_made_for_it(each))
    return told + (f" Left out, as it was made so that the mask has to cost: {made}." if made else "")


def _both_learned(condition: dict[str, Any]) -> bool:
    return all(one["learned"] for one in condition["arms"] if one["name"] in (REFERENCE, "bidirectional"))
