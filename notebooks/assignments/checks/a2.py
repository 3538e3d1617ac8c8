"""A2, convert GPT-2 and prove it: what its checks ask, and the models that attack the student's audit.

Every model is a tiny GPT-2 of fresh weights to which a `kind` was done: an honest conversion, one of labkit's pitfalls,
or a fault of our own, planted as masks on its layers. Who can influence whom then follows from the masks alone
(`reach`); answers find it out by perturbing the model, which is another way.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from labkit.course.answers import Answer
from labkit.course.exercises import Assignment
from labkit.course.mistakes import expect, expect_equal, expect_tensor, lacks_cells, not_finite
from labkit.course.variant import Variant

ASSIGNMENT = A2 = Assignment("a2", "Convert GPT-2 and prove it", minutes=90)
A2.exercise("a2_noticed", "Who notices?", "who_notices", difficulty=1, minutes=8)
A2.exercise("a2_influence", "The influence matrix", "influence", difficulty=2, minutes=10)
A2.exercise("a2_verdict", "A verdict", "verdict", difficulty=1, minutes=5)
A2.exercise("a2_padding", "Beside a padded row", "influence_padded", difficulty=3, minutes=10)
A2.exercise("a2_heads", "Layer by layer, head by head", "head_influence", difficulty=4, minutes=20)
A2.exercise("a2_same", "The same computation", "same_computation", difficulty=2, minutes=8)
A2.exercise("a2_full_mask", "The conversion", "full_mask", difficulty=2, minutes=8)
A2.exercise("a2_audit", "Your audit, under attack", "audit", difficulty=5, minutes=21)
SENTENCES = (
    "The old man the boat.", "The prime number few.", "The complex houses married students.",
    "We painted the wall with cracks.", "The horse raced past the barn fell.",
    "When the dog scratched the vet ran away.",
)  # fmt: skip
A2.shows("sentence", SENTENCES)
A2.shows("word", (" ship", " house", " river", " letter", " dog"))  # one token each, to gpt2-mini's tokenizer
A2.shows("pads", (3, 2, 4))

LAYERS, HEADS, VOCABULARY, SPREAD = 2, 4, 453, 0.1  # of tiny-gpt2; a small spread leaves no weight near zero
CLOSED, FAINT = torch.finfo(torch.float32).min, {"faint future": -10.0, "faint pads": -12.0}


# -- the models --------------------------------------------------------------------------------------------------------
def model(kind: str, seed: int, training: bool = False, twins: tuple = (), attn: str = "sdpa") -> nn.Module:
    """A tiny GPT-2 with weights of this seed, to which `kind` was done. `twins`: ids with the vector of the first."""
    from labkit import pitfalls
    from labkit.convert import to_bidirectional
    from labkit.models.tiny import build_tiny_model
    from labkit.pitfalls.rewrites import rewrite

    made, generator = build_tiny_model("tiny-gpt2", attn=attn), torch.Generator().manual_seed(seed)
    words, places = made.transformer.wte.weight, made.transformer.wpe.weight
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, SPREAD, generator=generator)
        words[list(twins)] = words[list(twins[:1])]
        if kind in ("nudged", "loud"):
            made.transformer.h[0].attn.c_attn.weight[:, : 2 * words.shape[1]] *= {"nudged": 1.02, "loud": 300}[kind]
        elif kind == "late position":
            places[5:] = places[5:].flip(-1)
    conversions = {
        "by hand": rewrite, "labkit": to_bidirectional, "forgets-scaling": pitfalls.get("forgets-scaling").apply
    }  # fmt: skip
    if kind in conversions:
        conversions[kind](made)
    elif kind not in ("as it came", "loud"):
        for block in made.transformer.h:
            _plant_mask(block, kind, seed)
    return made.train(training)


def _plant_mask(block: nn.Module, kind: str, seed: int) -> None:
    """Replaces the mask of a block; `labkit.masked`, whose hooks come later, still has the last word."""

    def replace(block: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        call = inspect.signature(block.forward).bind(*args, **kwargs)
        real, mask = torch.ones(args[0].shape[:2], dtype=torch.bool), call.arguments.get("attention_mask")
        if mask is not None:  # the last query of a causal mask attends to every real key
            last = mask[:, 0, -1]
            real = last if last.dtype == torch.bool else last == 0
        call.arguments["attention_mask"] = added(kind, seed, block.attn.layer_idx, real, block.training)
        return call.args, call.kwargs

    block.register_forward_pre_hook(replace, with_kwargs=True)


def added(kind: str, seed: int, layer: int, real: Tensor, training: bool = False) -> Tensor:
    """What `kind` adds to the scores of a layer, (batch, heads, query, key). real: bool (batch, n), n at least 5."""
    n, rng, padded = real.shape[1], random.Random(seed), not bool(real.all())
    here, at_head = rng.randrange(LAYERS) == layer, rng.randrange(HEADS)
    query, key = rng.randrange(2), rng.randrange(3, 5)
    i, j, head = torch.arange(n)[:, None], torch.arange(n), torch.arange(HEADS)[:, None, None] == at_head
    causal, full, keys = j <= i, torch.ones(n, n, dtype=torch.bool), real[:, None, None, :]
    opened = {
        "as it came": causal,
        "peek": j <= i + 1,
        "one layer": full if here else causal,
        "one head": causal | head,
        "one cell": ~((i == query) & (j == key)) if here else full,
        "alone": causal if padded else full,
        "beside": full if padded else causal,
        "training": full if training else causal,
        "evaluation": causal if training else full,
    }.get(kind, full)
    may = opened.expand(len(real), HEADS, n, n) & (keys | (kind == "pads heard")) | (i == j)
    if kind == "faint pads":
        return torch.zeros(may.shape).masked_fill(~may, FAINT[kind])
    faint = (j > i) * FAINT[kind] if kind == "faint future" else 0.0
    return (torch.zeros(may.shape) + faint).masked_fill(~may, CLOSED)


def reach(kind: str, seed: int, real: Tensor) -> Tensor:
    """Who can be influenced by whom through all layers and heads: bool (batch, output, token); False for pads' rows."""
    reached = torch.eye(real.shape[1]).expand(len(real), -1, -1)
    for layer in range(LAYERS):
        reached = ((added(kind, seed, layer, real) > CLOSED).any(1).float() @ reached > 0).float()
    return reached.bool() & real[:, :, None]


def on_models(answer: Callable, *arguments: Any) -> tuple[Any, dict[str, Any]]:
    """What the answer returns, and what it leaves behind; an argument that is a dict stands for a model."""
    made = [model(**argument) if isinstance(argument, dict) else argument for argument in arguments]
    return answer(*made), state(*made)


def state(of: nn.Module, *arguments: Any) -> dict[str, Any]:
    """What a measurement must leave as it is: the model, and the ids."""
    return {
        "number of hooks": sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in of.modules()),
        "training mode": of.training,
        # Of the bits, as integers: the sum of floats depends on the number of threads, and so on the process.
        "checksum of the weights": sum(int(p.detach().view(torch.int32).sum()) for p in of.parameters()),
        "ids": [argument.tolist() for argument in arguments if isinstance(argument, Tensor)],
    }


# -- the checks --------------------------------------------------------------------------------------------------------
@A2.part("a2_noticed", points=3, cases=("as it came", "open"))
def one_changed_token(answer: Answer, variant: Variant, kind: str) -> None:
    n, seed = variant.whole(f"noticed {kind}", 6, 9), variant.seed(f"noticed {kind}")
    j = n - 3
    noticed = reach(kind, seed, torch.ones(1, n).bool())[0, :, j]
    suspects = {
        "The token itself does not notice. Was another one changed? They count from 0.": noticed
        & (torch.arange(n) != j),
        "An output may keep its best guess, while other numbers of it change.": lacks_cells(noticed),
    }
    what = f'who notices another token at {j} of {n} in the model "{kind}"'
    expect_tensor(_answered(answer, _model(kind, seed), _ids(variant, "noticed", n), j, 5), noticed, what, suspects)


@A2.part("a2_influence", points=2, cases=("as it came", "peek"))
def the_matrix(answer: Answer, variant: Variant, kind: str) -> None:
    n, seed = variant.whole(f"matrix {kind}", 6, 8), variant.seed(f"matrix {kind}")
    seen = reach(kind, seed, torch.ones(1, n).bool())[0]
    suspects = {
        "Rows and columns have changed places: row i notices, column j is the changed token.": seen.T,
        "The diagonal is missing: does an output not notice its own token?": seen & ~torch.eye(n).bool(),
        "Your changes pile up: put the old token back before the next one is changed.": seen.cummax(1).values,
    }
    what = f'the influence matrix of the model "{kind}"'
    expect_tensor(_answered(answer, _model(kind, seed), _ids(variant, "matrix", n)), seen, what, suspects)


@A2.part("a2_influence", points=2, hidden=True)
def twins_and_a_whisper(answer: Answer, variant: Variant) -> None:
    ids, j, full = _ids(variant, "twins", 6), variant.whole("twin", 0, 3), torch.ones(6, 6).bool()
    ids[0, 4], token = VOCABULARY - 1, int(ids[0, j])  # the last id of all is among them
    others = variant.rng("others").choice(((token + 1, token + 2), (token + 1, token - 1), (token + 1, 0)))
    likely = f"Token {token} has twins here, ids with the same vector. How many other tokens do you try at a place?"
    actual = _answered(answer, _model("open", 7, twins=(token, *others)), ids)
    expect_tensor(actual, full, "the influence matrix of an open model with twins", {likely: full & (ids[0] != token)})
    likely = "The future is faint, and it is heard. Does your comparison let small differences pass as equal?"
    actual = _answered(answer, _model("faint future", variant.seed("whisper")), _ids(variant, "whisper", 6))
    expect_tensor(actual, full, 'the influence matrix of the model "faint future"', {likely: lacks_cells(full)})


@A2.part("a2_verdict", points=3)
def the_word(answer: Answer, variant: Variant) -> None:
    n = variant.whole("verdict", 5, 8)
    full = torch.ones(n, n).bool()
    cases = {
        "The diagonal and all below it: that is what causal looks like.": (full.tril(), "causal"),
        "Everybody notices everything: there is nothing more to open.": (full, "bidirectional"),
        "A single cell lies above the diagonal: not causal any more, and not bidirectional.": (
            full.tril() | full.triu(n - 1), "mixed"
        ),
        "Only the next token is noticed. Is one corner all you look at?": (full.tril(1), "mixed"),
        "The table is symmetric, and yet many do not notice each other.": (full.tril(1).triu(-1), "mixed"),
        "Nobody looks ahead, and nobody back either: it reads no text.": (torch.eye(n).bool(), "mixed"),
        "Everybody notices what comes later, nobody what came before.": (full.triu(), "mixed"),
    }  # fmt: skip
    for likely, (seen, word) in cases.items():
        picture = " / ".join("".join("■" if cell else "·" for cell in row) for row in seen.tolist())
        expect_equal(answer(seen), word, f"the verdict on {picture}", likely)


@A2.part("a2_padding", points=1, hidden=True, cases=("pads heard", "faint pads"))
@A2.part("a2_padding", points=3, cases=("as it came", "open", "alone"))
def two_rows(answer: Answer, variant: Variant, kind: str) -> None:
    n, k, seed = variant.whole(f"rows {kind}", 6, 8), variant.whole(f"pads {kind}", 2, 3), variant.seed(f"rows {kind}")
    real = torch.ones(2, n).bool()
    real[1, n - k :] = False
    seen = reach(kind, seed, real)

    def has_rows_of_pads(actual: Tensor) -> bool:
        return actual.shape == seen.shape and bool(actual[~real].any())

    suspects = {
        f"The last {k} of row 1 are pads. What the outputs of pads notice interests nobody.": has_rows_of_pads,
        "Pads are noticed as if they were words. Did the mask go along?": reach("pads heard", seed, real),
        "Row 0 is open only where it is run alone. Are both rows in one batch?": seen | real.all(1)[:, None, None],
        "Nobody notices pads, it says. Was another id put in a pad's place?": reach("open", seed, real),
    }
    what = f'the influence beside {k} pads in the model "{kind}"'
    expect_tensor(_answered(answer, _model(kind, seed), _ids(variant, kind, n), k), seen, what, suspects)


@A2.part("a2_heads", points=2, hidden=True, cases=("one cell",))
@A2.part("a2_heads", points=3, cases=("one layer", "one head"))
def single_heads(answer: Answer, variant: Variant, kind: str) -> None:
    n, seed = variant.whole(f"heads {kind}", 5, 7), variant.seed(f"heads {kind}")
    real = torch.ones(1, n).bool()
    for layer in range(LAYERS):
        seen = (added(kind, seed, layer, real) > CLOSED)[0]
        gathered = reach(kind, seed, real).expand(HEADS, n, n)
        suspects = {
            "All heads say the same: they were mixed, or cut in the wrong places.": seen.any(0).expand(HEADS, n, n),
            "That has gathered in several layers, or in another one. Where does your change enter?": gathered,
            "Rows and columns have changed places.": seen.mT,
            "Your push is not felt everywhere. LayerNorm removes what all numbers of a state share.": lacks_cells(seen),
        }
        actual = _answered(answer, _model(kind, seed), _ids(variant, kind, n), layer)
        expect_tensor(actual, seen, f"who notices whom in layer {layer}, by head,", suspects)


@A2.part("a2_same", points=1, cases=("labkit", "late position"), hidden=True)
@A2.part("a2_same", points=2, cases=("open", "by hand", "forgets-scaling", "nudged"))
def the_mask_put_back(answer: Answer, variant: Variant, kind: str) -> None:
    seed = variant.seed(f"same {kind}")
    judgement = _answered(answer, _model("as it came", seed), _model(kind, seed), _ids(variant, kind, 8))
    honest = kind in HONEST
    expect_equal(judgement, honest, f"the answer on {'an honest' if honest else 'a faulty'} model", LIKELY[kind])


@A2.part("a2_full_mask", points=3, cases=("as it came", "loud"))
def the_full_mask(answer: Answer, variant: Variant, kind: str) -> None:
    n, rng = variant.whole("full", 6, 8), variant.rng("full lengths")
    lengths = torch.tensor([rng.randint(2, n - 2), n, rng.randint(3, n - 1)])[:, None]
    real = torch.arange(n) < lengths if kind == "as it came" else torch.arange(n) >= n - lengths
    mask = torch.as_tensor(answer(real.long()))
    expect(mask.shape == (3, 1, n, n), f"a mask of shape {(3, 1, n, n)}", f"shape {tuple(mask.shape)}")
    likely = "Eager attention adds its mask to the scores, and True counts as 1. What number is to be added?"
    expect(mask.is_floating_point(), "a mask of real numbers", str(mask.dtype), likely)
    original, ids = model(kind, variant.seed(f"mask {kind}"), attn="eager"), _ids(variant, "mask", n).expand(3, n)
    pads = ~real[:, None, None, :]

    @torch.no_grad()
    def logits(closed: Tensor, score: float = CLOSED, zero: Tensor | float = 0.0) -> Tensor:
        added_to_scores = (torch.zeros(3, 1, n, n) + zero).masked_fill(closed, score)
        return original(input_ids=ids, attention_mask=added_to_scores).logits[real]

    suspects = {
        "A row of nothing but -inf has no softmax. Only pads as keys are to be closed.": not_finite,
        "Pads are listened to: what is added to their scores?": logits(pads & False),
        "Ones and zeros are added to the scores: a pad is only a little less likely.": logits(~pads, 1.0),
        "The real tokens are closed and the pads are open.": logits(~pads),
        "The triangle is there still.": logits(pads | torch.ones(n, n).bool().triu(1)),
        "-10000 hides a pad until scores get as large. Here they do.": logits(pads, -1e4),
    }
    actual = logits(pads & False, zero=mask.float())
    expect_tensor(actual, logits(pads), "the logits of the real tokens under your mask", suspects, 1e-4)


KNOWN = ("by hand", "as it came", "alone", "one layer", "labkit", "pads heard", "forgets-scaling")
UNKNOWN = (
    "one head", "evaluation", "training", "beside", "peek", "faint pads", "open", "one cell", "faint future", "nudged"
)  # fmt: skip


@A2.part("a2_audit", points=4, cases=UNKNOWN, hidden=True)
@A2.part("a2_audit", points=4, cases=KNOWN)
def attacks(answer: Answer, variant: Variant, kind: str) -> None:
    if variant.round:
        return  # an audit takes time, and one round has models enough
    seed, training = variant.seed(f"audit {kind}"), bool(variant.whole(f"mode {kind}", 0, 1))
    judgement = _answered(answer, _model(kind, seed, training=training), _model("as it came", seed))
    honest = kind in HONEST
    expect_equal(judgement, honest, f"the audit of {'an honest' if honest else 'a faulty'} model", LIKELY[kind])


HONEST = ("open", "labkit", "by hand")
LIKELY = {  # what is said of a wrong judgement on a model of this kind
    "open": "Its mask is open, and nothing else. Which mask is in force when you compare logits?",
    "labkit": "An honest conversion. Which mask is in force when you compare, and which test does it fail?",
    "by hand": "Its sums are right, in another order: last bits differ. How equal must they be?",
    "as it came": "It was never opened: all look back only.",
    "forgets-scaling": "Its weights are the original's; what it does with them is not. Is it the same computation?",
    "nudged": "Its logits differ, if only a little. Are best guesses all that you compare?",
    "late position": "It goes wrong late in the sentence only. Which positions do you compare?",
    "alone": "Open alone, causal beside a padded row. Do you try it in company?",
    "beside": "It opens beside a padded row only. Do you try it alone?",
    "one layer": "One open layer is enough for all outputs. Do you look inside, layer by layer?",
    "one head": "Closed heads hide behind open ones. Do you keep them apart?",
    "one cell": "In one layer one token is closed to one other. Do you look at every cell?",
    "pads heard": "Pads are heard. Do you change pads, and look?",
    "faint pads": "Pads are heard, faintly: -12 closes nothing. Do small differences pass?",
    "faint future": "All hear the future, but faintly. What ought the logits to be?",
    "evaluation": "It is open in evaluation only. Do you try both modes?",
    "training": "It is open in training only. Do you try both modes?",
    "peek": "Each token looks one ahead, and no further. Is what you see full?",
}


def _answered(answer: Answer, settings: dict[str, Any], *arguments: Any) -> Any:
    """What the answer returns for a model with these settings and more, all of which it must leave as they are."""
    result, after = answer(settings, *arguments, function="on_models")
    likely = "What you register, switch or write for a measurement must be undone, whatever happens in between."
    before = state(model(**settings), *arguments)
    for name in ("number of hooks", "training mode", "checksum of the weights"):
        expect(after[name] == before[name], f"the {name} to be {before[name]} as before", f"{after[name]}", likely)
    likely = "Your function writes into ids: the next run begins from the changed sentence. Did you clone?"
    expect(after["ids"] == before["ids"], "ids to be left as it was", f"{after['ids']}", likely)
    return result


def _model(kind: str, seed: int, **more: Any) -> dict[str, Any]:
    return {"kind": kind, "seed": seed, **more}


def _ids(variant: Variant, name: str, n: int) -> Tensor:
    """n different token ids, (1, n); the lowest, which are special, and the highest are left out."""
    return torch.tensor([variant.rng(f"ids {name}").sample(range(10, VOCABULARY - 10), n)])
