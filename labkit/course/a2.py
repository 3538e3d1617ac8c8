"""A2, convert GPT-2 and prove it: what its checks ask, and the models that attack the student's audit.

Every model is a tiny GPT-2 of fresh weights to which a `kind` was done: an honest conversion, one of labkit's pitfalls,
or a fault of our own, planted as masks on its layers. Who can influence whom then follows from the masks alone
(`reach`); answers find it out by perturbing the model, which is another way.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from labkit import masks
from labkit.course.answers import Answer, Given
from labkit.course.exercises import Assignment
from labkit.course.judging import ROUNDS
from labkit.course.mistakes import expect, expect_all, expect_tensor
from labkit.course.variant import Variant

ASSIGNMENT = A2 = Assignment("a2", "Convert GPT-2 and prove it", minutes=90)

SENTENCES = (
    "The old man the boat.", "The prime number few.", "The complex houses married students.",
    "We painted the wall with cracks.", "The horse raced past the barn fell.",
    "When the dog scratched the vet ran away.",
)  # fmt: skip
WORDS = (" ship", " house", " river", " letter", " dog")  # one token each, to gpt2-mini's tokenizer
CELL, HEAD_CELL, ROW_CELL = ("output", "token"), ("head", "output", "token"), ("row", "output", "token")
LAYERS, HEADS, VOCABULARY, SPREAD = 2, 4, 453, 0.1  # of tiny-gpt2; a small spread leaves no weight near zero
CLOSED, FAINT = torch.finfo(torch.float32).min, {"faint future": -4.0, "whispered future": -10.0, "faint pads": -12.0}

A2.draws("sentence")(lambda variant: variant.choose("a2 sentence", SENTENCES))
A2.draws("word")(lambda variant: variant.choose("a2 word", WORDS))
A2.draws("pads")(lambda variant: variant.choose("a2 pads", (3, 2, 4)))

# -- the models --------------------------------------------------------------------------------------------------------


@A2.given("model")
def model(kind: str, seed: int, training: bool = False, twins: tuple = (), attn: str = "sdpa") -> nn.Module:
    """A tiny GPT-2 with weights of this seed, to which `kind` was done. `twins`: ids with the vector of the first."""
    from labkit import pitfalls, to_bidirectional
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
    if kind == "by hand":
        rewrite(made)
    elif kind == "labkit":
        to_bidirectional(made)
    elif kind in {pitfall.name for pitfall in pitfalls.ALL}:
        pitfalls.get(kind).apply(made)
    elif kind not in ("as it came", "loud"):
        _put_masks(made, kind, seed)
    return made.train(training)


def _put_masks(made: nn.Module, kind: str, seed: int) -> None:
    """On the layers, as labkit's own: whoever puts a mask on the layers later (`labkit.masked`) has the last word."""
    noted: dict[str, Tensor | None] = {}

    def note(stack: nn.Module, args: tuple, kwargs: dict) -> None:
        noted["mask"] = kwargs.get("attention_mask")

    def deliver(block: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        real = torch.ones(args[0].shape[:2]) if noted["mask"] is None else noted["mask"]
        if real.ndim != 2:
            return None  # who brings a 4-D mask has taken the matter in hand
        mask = added(kind, seed, block.attn.layer_idx, real.bool(), block.training)
        if len(args) > 2:  # by position, as transformers does it now
            return (*args[:2], mask, *args[3:]), kwargs
        return args, {**kwargs, "attention_mask": mask}

    made.transformer.register_forward_pre_hook(note, with_kwargs=True)
    for block in made.transformer.h:
        block.register_forward_pre_hook(deliver, with_kwargs=True)


def added(kind: str, seed: int, layer: int, real: Tensor, training: bool = False) -> Tensor:
    """What `kind` adds to the scores of a layer, (batch, heads, query, key). real: bool (batch, n), n at least 5."""
    n, rng = real.shape[1], random.Random(seed)
    chosen, at_head, query, key = rng.randrange(LAYERS), rng.randrange(HEADS), rng.randrange(2), rng.randrange(3, 5)
    i, j, head = torch.arange(n)[:, None], torch.arange(n)[None, :], torch.arange(HEADS)[:, None, None] == at_head
    causal, full = j <= i, torch.ones(n, n, dtype=torch.bool)
    opened = {
        "as it came": causal,
        "start": causal | (j < 3),
        "peek": j <= i + 1,
        "one layer": full if layer == chosen else causal,
        "one head": causal | head,
        "all but one head": causal | ~head,
        "one cell": ~((i == query) & (j == key)) if layer == chosen else full,
        "alone": full if bool(real.all()) else causal,
        "beside": causal if bool(real.all()) else full,
        "training": full if training else causal,
        "evaluation": causal if training else full,
    }.get(kind, full)
    may = opened.expand(len(real), HEADS, n, n) & (real[:, None, None, :] | (kind == "pads heard"))
    cells = torch.zeros(may.shape).masked_fill(~(may | (i == j)), CLOSED)
    if kind in FAINT:
        faint = ~real[:, None, None, :] & (i != j) if kind == "faint pads" else (j > i) & real[:, None, None, :]
        cells = cells.masked_fill(faint, FAINT[kind])
    return cells


def reach(kind: str, seed: int, real: Tensor) -> Tensor:
    """Who can be influenced by whom through all layers and heads: bool (batch, output, token); False for pads' rows."""
    found = torch.eye(real.shape[1]).expand(len(real), -1, -1)
    for layer in range(LAYERS):
        found = ((added(kind, seed, layer, real) > CLOSED).any(1).float() @ found > 0).float()
    return found.bool() & real[:, :, None]


@A2.exercise("a2_noticed", "Who notices?", answer="who_notices", points=3, difficulty=1, minutes=8)
def one_changed_token(answer: Answer, variant: Variant) -> None:
    for kind in ("as it came", "start", "open"):
        n, seed = variant.whole(f"noticed {kind}", 6, 9), variant.seed(f"noticed {kind}")
        ids, j = _ids(variant, "noticed", n), n - 3
        seen, here = reach(kind, seed, torch.ones(1, n).bool())[0], torch.arange(n) == j
        suspects = {
            "Nobody notices. Did both runs read the changed sentence? What is written into ids stays.": here & ~here,
            "The token itself does not notice. Was another one changed? They count from 0.": seen[:, j] & ~here,
        }
        few = "Some who notice are missing. An output may keep its best guess, while other numbers of it change."
        what = f"who notices another token at {j} of {n}, in a model where {DOES[kind]},"
        found, after = answer.observed("with ids", _given(kind, seed), ids, j, 5)
        _expect_seen(found, seen[:, j], what, suspects, few, CELL[:1])
        likely = "Your function writes into ids: the next run begins from the changed sentence. Did you clone?"
        expect(torch.equal(after, ids), "ids to be left as it was", "other ids", likely)


@A2.exercise("a2_influence", "The influence matrix", answer="influence", points=2, difficulty=2, minutes=10)
def the_matrix(answer: Answer, variant: Variant) -> None:
    for kind in ("as it came", "start", "peek"):
        n, seed = variant.whole(f"matrix {kind}", 6, 8), variant.seed(f"matrix {kind}")
        seen = reach(kind, seed, torch.ones(1, n).bool())[0]
        piled = seen.int().cummax(1).values.bool()
        suspects = {
            "Rows and columns have changed places: row i notices, column j is the changed token.": seen.T,
            "The diagonal is missing: does an output not notice its own token?": seen & ~torch.eye(n).bool(),
            "Your changes pile up: before token 3 is changed, put the old 0 to 2 back.": piled,
        }
        what = f"the influence matrix of a model where {DOES[kind]}"
        expect_tensor(answer(_given(kind, seed), _ids(variant, "matrix", n)), seen, what, suspects, names=CELL)


@A2.also("a2_influence", points=2, hidden=True)
def twins_and_a_whisper(answer: Answer, variant: Variant) -> None:
    n, ids, j = 6, _ids(variant, "twins", 6), variant.whole("twin", 0, 3)
    ids[0, 4], token = VOCABULARY - 1, int(ids[0, j])  # the last id of all is among them
    others = variant.rng("others").choice(((token + 1, token + 2), (token + 1, token - 1), (token + 1, 0)))
    found = answer(_given("open", 7, twins=(token, *others)), ids)
    likely = f"Token {token} has twins here, ids with the same vector. How many other tokens do you try at a place?"
    suspects = {likely: (torch.arange(n) != j).expand(n, n)}
    what = "the influence matrix of a model that is open everywhere and has twins"
    expect_tensor(found, torch.ones(n, n).bool(), what, suspects, names=CELL)
    found = answer(_given("whispered future", variant.seed("whisper")), _ids(variant, "whisper", 6))
    faint = "The future is faint, and it is heard. Does your comparison let small differences pass as equal?"
    what = "the influence matrix where the future's scores are lowered by 10, and not closed,"
    _expect_seen(found, torch.ones(6, 6).bool(), what, {}, faint, CELL)


@A2.exercise("a2_verdict", "A verdict", answer="verdict", points=3, difficulty=1, minutes=5)
def the_word(answer: Answer, variant: Variant) -> None:
    full = torch.ones(n := variant.whole("verdict", 5, 8), n).bool()
    one = full.tril()
    one[0, n - 1] = True
    _expect_word(answer, full.tril(), "causal", "The diagonal and all below it: that is what causal looks like.")
    _expect_word(answer, full, "bidirectional", "Everybody notices everything: there is nothing more to open.")
    _expect_word(answer, one, "mixed", "A single cell lies above the diagonal: neither causal any more, nor both ways.")
    _expect_word(answer, full.tril(1), "mixed", "Only the next token is noticed. Is one corner all you look at?")
    _expect_word(answer, full.tril(1).triu(-1), "mixed", "Symmetric it is, and yet many do not notice each other.")
    _expect_word(answer, full.tril().triu(), "mixed", "Nobody looks ahead, and nobody back either: it reads no text.")
    _expect_word(answer, full.triu(), "mixed", "Everybody notices what comes later, nobody what came before.")


@A2.exercise("a2_padding", "Beside a padded row", answer="influence_padded", points=3, difficulty=3, minutes=10)
def two_rows(answer: Answer, variant: Variant) -> None:
    for kind in ("as it came", "open", "layer-flag-off"):
        _expect_padded(answer, variant, kind)


@A2.also("a2_padding", points=1, hidden=True)
def pads_that_are_heard(answer: Answer, variant: Variant) -> None:
    for kind in ("pads heard", "faint pads"):
        _expect_padded(answer, variant, kind)


@A2.exercise("a2_heads", "Layer by layer, head by head", answer="head_influence", points=3, difficulty=4, minutes=20)
def single_heads(answer: Answer, variant: Variant) -> None:
    for kind in ("one layer", "one head"):
        for layer in range(LAYERS):
            _expect_heads(answer, variant, kind, layer)


@A2.also("a2_heads", points=2, hidden=True)
def one_cell_and_nothing_left_behind(answer: Answer, variant: Variant) -> None:
    for layer in range(LAYERS):
        _expect_heads(answer, variant, "one cell", layer)
    _expect_state(answer, {"kind": "one head", "seed": 3}, _ids(variant, "behind", 5), 1)


@A2.exercise("a2_same", "The same computation", answer="same_computation", points=2, difficulty=2, minutes=8)
def the_mask_put_back(answer: Answer, variant: Variant) -> None:
    _expect_vouched(answer, variant, ("open", "by hand", "other sums", "nudged"), SAME)


@A2.also("a2_same", points=1, hidden=True)
def everywhere(answer: Answer, variant: Variant) -> None:
    _expect_vouched(answer, variant, ("labkit", "late"), SAME)


@A2.exercise("a2_full_mask", "The conversion", answer="full_mask", points=3, difficulty=2, minutes=8)
def the_full_mask(answer: Answer, variant: Variant) -> None:
    n, rng = variant.whole("full", 6, 8), variant.rng("full lengths")
    lengths = torch.tensor([rng.randint(2, n - 2), n, rng.randint(3, n - 1)])
    _expect_full_mask(answer, "as it came", variant, torch.arange(n) < lengths[:, None])
    in_front = torch.tensor([4, 0, variant.whole("front", 2, 3)])
    _expect_full_mask(answer, "loud", variant, torch.arange(7) >= in_front[:, None])


@A2.exercise("a2_audit", "Your audit, under attack", answer="audit", points=4, difficulty=5, minutes=21)
def known_attacks(answer: Answer, variant: Variant) -> None:
    known = ["by hand", "never", "shut", "outside", "honest", "heard", "wrecked"]
    _expect_vouched(answer, variant, known[variant.round :: 1 + variant.round], AUDIT)  # fewer in later rounds


@A2.also("a2_audit", points=4, hidden=True)
def unannounced_attacks(answer: Answer, variant: Variant) -> None:
    unknown = ["partly", "evaluation", "training", "beside", "cell", "faint pads", "honest", "peek", "faint future"]
    _expect_vouched(answer, variant, unknown[variant.round % ROUNDS :: ROUNDS], AUDIT)  # the rounds share them out
    kind, training = ("one layer", True) if variant.round else ("open", False)
    _expect_state(answer, {"kind": kind, "seed": 3, "training": training}, _given("as it came", 3))


# -- what is said ------------------------------------------------------------------------------------------------------

DOES = {
    "as it came": "each token looks back only", "open": "each token looks at all",
    "start": "each token looks back, and at the first three", "peek": "each token looks back, and at the next one",
    "pads heard": "each token looks at all, pads included", "faint pads": "all are looked at, and pads a little",
    "layer-flag-off": "the layers say is_causal = False",
}  # fmt: skip
SAME = {  # what may be drawn, the right answer, what is said to the other one
    "open": (("open",), True, "Under different masks logits differ, of course. Which one is in force?"),
    "labkit": (("labkit", "config-flag-alone"), True, "An honest conversion. Which mask is in force when you compare?"),
    "by hand": (("by hand",), True, "The same sums in another order: last bits differ. How equal must they be?"),
    "other sums": (("forgets-scaling",), False, "Its weights are the original's; what it does with them is not."),
    "nudged": (("nudged",), False, "Its logits differ, if only a little. Are best guesses all that you compare?"),
    "late": (("late position",), False, "It goes wrong late in the sentence only. Which positions do you compare?"),
}
AUDIT = {
    "honest": (("open", "labkit", "config-flag-alone"), True, "Which test says no? Must honest conversions pass it?"),
    "by hand": (("by hand",), True, "Its sums are right, in another order: last bits differ. How equal must they be?"),
    "never": (("as it came", "use-cache-off", "dead-bias-buffer"), False, "It was never opened: all look back only."),
    "shut": (("layer-flag-off", "alone"), False, "Open alone, causal beside a padded row. Do you try it in company?"),
    "beside": (("beside", "patched-mask-builder"), False, "It opens beside a padded row only. Do you try it alone?"),
    "outside": (("one layer",), False, "One open layer is enough for all outputs. Do you look inside, layer by layer?"),
    "heard": (("pads heard", "multiplies-scores-by-mask"), False, "Pads are heard. Do you change pads, and look?"),
    "wrecked": (("forgets-scaling", "nudged"), False, "Its mask is right. Is it the same computation?"),
    "partly": (("one head", "all but one head"), False, "Closed heads hide behind open ones. Do you keep them apart?"),
    "evaluation": (("evaluation",), False, "It is open in evaluation only. Do you try both modes?"),
    "training": (("training",), False, "It is open in training only. Do you try both modes?"),
    "cell": (("one cell",), False, "In one layer one token is closed to one other. Do you look at every cell?"),
    "peek": (("peek",), False, "Each token looks one ahead, and no further. Is what you see full?"),
    "faint pads": (("faint pads",), False, "Pads are heard, faintly: -12 closes nothing. Do small differences pass?"),
    "faint future": (("faint future",), False, "All hear the future, but faintly. What ought the logits to be?"),
}


def _expect_vouched(answer: Answer, variant: Variant, names: Iterable[str], words: dict[str, tuple]) -> None:
    """`same_computation(original, converted, ids)` or `audit(converted, original)`, for a kind of each name."""

    def ask(name: str) -> None:
        kinds, wanted, likely = words[name]
        kind, seed = variant.rng(f"kind {name}").choice(kinds), variant.seed(f"vouched {name}")
        arguments = [_given(kind, seed), _given("as it came", seed)]
        found = answer(*arguments) if words is AUDIT else answer(*arguments[::-1], _ids(variant, name, 8))
        found = found.item() if isinstance(found, Tensor) and found.numel() == 1 else found
        expect(isinstance(found, bool), f"{answer.name} to say True or False", f"{found!r:.80}")
        expect(found == wanted, f"{wanted} of {'an honest model' if wanted else 'a faulty model'}", str(found), likely)

    names = list(names)
    expect_all(names, ask, variant.rng(f"order of {names}"))


def _expect_seen(found: Any, wanted: Tensor, what: str, suspects: dict, few: str, names: tuple[str, ...]) -> None:
    """Tables of True and False; `few` is said where nothing is wrong but that some cells are missing."""
    if isinstance(found, Tensor) and found.shape == wanted.shape and found.dtype == torch.bool:
        suspects = suspects if (found & ~wanted).any() else {**suspects, few: found}  # as the last one, it always fits
    expect_tensor(found, wanted, what, suspects, names=names)


def _expect_word(answer: Answer, seen: Tensor, wanted: str, likely: str) -> None:
    picture = " / ".join("".join("■" if cell else "·" for cell in row) for row in seen.tolist())
    found = answer(seen)
    expect(isinstance(found, str), "a word", f"{found!r:.80}")
    expect(found == wanted, f"{wanted!r} of the matrix {picture}", f"{found!r:.80}", likely)


def _expect_padded(answer: Answer, variant: Variant, kind: str) -> None:
    n, k, seed = variant.whole(f"rows {kind}", 6, 8), variant.whole(f"pads {kind}", 2, 3), variant.seed(f"rows {kind}")
    real, whole = torch.ones(2, n).bool(), torch.ones(n, n).bool()
    real[1, n - k :] = False
    wanted = reach("as it came" if kind == "layer-flag-off" else kind, seed, real)
    found = answer(_given(kind, seed), _ids(variant, kind, n), k)
    if isinstance(found, Tensor) and found.shape == wanted.shape and found[1, n - k :].any():
        likely = f"The last {k} of row 1 are pads. What the outputs of pads notice interests nobody."
        expect(False, "rows of pads that are False", "True in some of their cells", likely)
    heard = reach("pads heard", seed, real)
    suspects = {
        "Pads are noticed as if they were words. Did the mask go along, and stay as it was?": heard,
        "Row 0 is open only where it is run alone. Are both rows in one batch?": torch.stack([whole, wanted[1]]),
        "Nobody notices pads, it says. Was another id put in a pad's place?": reach("open", seed, real),
    }
    what = f"the influence beside {k} pads, in a model where {DOES[kind]},"
    expect_tensor(found, wanted, what, suspects, names=ROW_CELL)


def _expect_heads(answer: Answer, variant: Variant, kind: str, layer: int) -> None:
    n, seed = variant.whole(f"heads {kind}", 5, 7), variant.seed(f"heads {kind}")
    real = torch.ones(1, n).bool()
    wanted = (added(kind, seed, layer, real) > CLOSED)[0]
    gathered, mixed = reach(kind, seed, real).expand(HEADS, n, n), wanted.any(0).expand(HEADS, n, n)
    suspects = {
        "All heads say the same: they were mixed, or cut in the wrong places.": mixed,
        "That has gathered in several layers, or in another one. Where does your change enter?": gathered,
        "Rows and columns have changed places.": wanted.mT,
    }
    found = answer(_given(kind, seed), _ids(variant, kind, n), layer)
    faint = "Your push is not felt everywhere. LayerNorm takes away what is the same in all numbers of a state."
    _expect_seen(found, wanted, f"who notices whom in layer {layer}, by head,", suspects, faint, HEAD_CELL)


def _expect_full_mask(answer: Answer, kind: str, variant: Variant, real: Tensor) -> None:
    from labkit import masked

    (rows, n), seed = real.shape, variant.seed(f"mask {kind}")
    found = answer(real.long())
    came = f"shape {tuple(found.shape)}" if isinstance(found, Tensor) else f"a {type(found).__name__}"
    expect(came == f"shape {(rows, 1, n, n)}", f"a mask of shape {(rows, 1, n, n)}", came)
    likely = "Eager attention adds its mask to the scores, and True counts as 1. What number is to be added?"
    expect(found.is_floating_point(), "a mask of real numbers", str(found.dtype), likely)
    original, ids = model(kind, seed, attn="eager"), _ids(variant, "mask", n).expand(rows, n)

    @torch.no_grad()
    def logits(mask: Tensor) -> Tensor:
        return original(input_ids=ids, attention_mask=mask).logits[real]

    with masked(original, masks.bidirectional()):
        wanted = logits(real.long())
    keys = real[:, None, None, :].expand(rows, 1, n, n)
    zero = torch.zeros(rows, 1, n, n)
    suspects = {
        "Pads are listened to: what is added to their scores?": zero,
        "Ones and zeros are added to the scores: a pad is only a little less likely.": keys.float(),
        "The real tokens are closed and the pads are open.": zero.masked_fill(keys, CLOSED),
        "The triangle is there still.": zero.masked_fill(~keys | torch.ones(n, n).bool().triu(1), CLOSED),
        "-10000 hides a pad until scores get as large. Here they do.": zero.masked_fill(~keys, -1e4),
    }
    came = logits(found.float())
    likely = "A row of nothing but -inf has no softmax. Only pads as keys are to be closed."
    expect(not came.isnan().any(), "logits that are numbers", "nan", likely)
    likely = {text: logits(mask) for text, mask in suspects.items()}
    expect_tensor(came, wanted, "the logits of the real tokens under your mask", likely, 1e-4)


def _expect_state(answer: Answer, arguments: dict[str, Any], *more: Any) -> None:
    found, before = answer.observed("state", _given(**arguments), *more), the_state(0, model(**arguments))
    likely = "What you register, switch or write for a measurement must be undone, whatever happens in between."
    for name, value in before.items():
        expect(found[name] == value, f"a model with its {name} as before: {value}", str(found[name]), likely)


@A2.observer("with ids")
def with_ids(result: Any, model: Any, ids: Tensor, *_: Any) -> list:
    return [result, ids]


@A2.observer("state")
def the_state(result: Any, of: nn.Module, *_: Any) -> dict[str, Any]:
    hooks = sum(len(each._forward_hooks) + len(each._forward_pre_hooks) for each in of.modules())
    weights = sum(float(parameter.detach().double().abs().sum()) for parameter in of.parameters())
    return {"number of hooks": hooks, "training mode": of.training, "sum of weights": weights}


def _given(kind: str, seed: int, **more: Any) -> Given:
    return Given("a2", "model", {"kind": kind, "seed": seed, **more})


def _ids(variant: Variant, name: str, n: int) -> Tensor:
    """n different token ids, (1, n); the lowest, which are special, and the highest are left out."""
    return torch.tensor([variant.rng(f"ids {name}").sample(range(10, VOCABULARY - 10), n)])
