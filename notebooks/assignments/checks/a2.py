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
from labkit.course.mistakes import Mistake, expect, expect_equal, expect_tensor, lacks_cells, not_finite
from labkit.course.variant import Variant

ASSIGNMENT = A2 = Assignment("a2", "Convert GPT-2 and prove it", minutes=110)
A2.exercise("a2_influence", "The influence matrix", "influence", difficulty=1, minutes=8)
A2.exercise("a2_verdict", "A verdict", "verdict", difficulty=1, minutes=4)
A2.exercise("a2_padding", "A batch with padding", "influence_in_batch", difficulty=2, minutes=10)
A2.exercise("a2_heads", "Layer by layer, head by head", "head_influence", difficulty=4, minutes=20)
A2.exercise("a2_difference", "Where the computation differs", "first_difference", difficulty=2, minutes=10)
A2.exercise("a2_packed", "Packed documents", "packed_inputs", difficulty=3, minutes=15)
A2.exercise("a2_audit", "Your audit, under attack", "audit", difficulty=4, minutes=25)
SENTENCES = (
    "The old man the boat.", "The prime number few.", "The complex houses married students.",
    "We painted the wall with cracks.", "The horse raced past the barn fell.",
    "When the dog scratched the vet ran away.",
)  # fmt: skip
A2.shows("sentence", SENTENCES)
A2.shows("pads", (3, 2, 4))

LAYERS, HEADS, VOCABULARY, SPREAD = 2, 4, 453, 0.1  # of tiny-gpt2; a small spread leaves no weight near zero
CLOSED, FAINT = torch.finfo(torch.float32).min, {"faint future": -10.0, "padding faint": -12.0}
COMPONENTS = {"component up": 0.01, "component down": -0.01}  # of the embedding of one position
FACTORS = {"weights scaled": 1.02, "large scores": 300.0}  # of queries and keys in one layer
QUIET = dict.fromkeys(("quiet head", "quiet original"), 1e-6)  # of what one head adds to the hidden states


# -- the models --------------------------------------------------------------------------------------------------------
def model(kind: str, seed: int, training: bool = False, attn: str = "sdpa") -> nn.Module:
    """A tiny GPT-2 with weights of this seed, to which `kind` was done."""
    from labkit import pitfalls
    from labkit.convert import to_bidirectional
    from labkit.models.tiny import build_tiny_model
    from labkit.pitfalls.rewrites import rewrite

    made, generator = build_tiny_model("tiny-gpt2", attn=attn), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, SPREAD, generator=generator)
        if kind in FACTORS:
            made.transformer.h[faulty_layer(seed)].attn.c_attn.weight[:, : 2 * made.config.n_embd] *= FACTORS[kind]
        elif kind in QUIET:
            projection = made.transformer.h[faulty_layer(seed)].attn.c_proj.weight
            projection.view(HEADS, -1, projection.shape[1])[faulty_head(seed)] *= QUIET[kind]
        elif kind == "late position":
            made.transformer.wpe.weight[5:] = made.transformer.wpe.weight[5:].flip(-1)
        elif kind in COMPONENTS:
            made.transformer.wpe.weight[3, 7] += COMPONENTS[kind]
        # transformers installs the hooks that record hidden states at the first use; answers are not blamed for them.
        made(torch.tensor([[3]]), output_hidden_states=True)
    conversions = {
        "by hand": rewrite, "labkit": to_bidirectional, "forgets-scaling": pitfalls.get("forgets-scaling").apply
    }  # fmt: skip
    if kind in conversions:
        conversions[kind](made)
    elif kind not in ("unchanged", "large scores", "quiet original"):
        for block in made.transformer.h:
            _plant_mask(block, kind, seed)
    return made.train(training)


def faulty_layer(seed: int) -> int:
    return random.Random(seed).randrange(LAYERS)


def faulty_head(seed: int) -> int:
    return random.Random(seed + 1).randrange(HEADS)


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
    here, at_head = rng.randrange(LAYERS) == layer, faulty_head(seed)
    query, key = rng.randrange(2), rng.randrange(3, 5)
    i, j, head = torch.arange(n)[:, None], torch.arange(n), torch.arange(HEADS)[:, None, None] == at_head
    causal, full, keys = j <= i, torch.ones(n, n, dtype=torch.bool), real[:, None, None, :]
    opened = {
        "unchanged": causal,
        "one ahead": j <= i + 1,
        "one layer": full if here else causal,
        "one head": causal | head,
        "quiet head": causal | ~head if here else full,
        "one cell": ~((i == query) & (j == key)) if here else full,
        "unpadded only": causal if padded else full,
        "padded only": full if padded else causal,
        "training only": full if training else causal,
        "evaluation only": causal if training else full,
    }.get(kind, full)
    may = opened.expand(len(real), HEADS, n, n) & (keys | (kind == "padding open")) | (i == j)
    if kind == "padding faint":
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
@A2.part("a2_influence", points=1, cases=("faint future",), hidden=True)
@A2.part("a2_influence", points=2, cases=("unchanged", "one ahead"))
def the_matrix(answer: Answer, variant: Variant, kind: str) -> None:
    n, seed = variant.whole(f"matrix {kind}", 6, 8), variant.seed(f"matrix {kind}")
    expected, ids = reach(kind, seed, torch.ones(1, n).bool())[0], _ids(variant, "matrix", n)
    ids[0, variant.whole("last id", 0, n - 1)] = VOCABULARY - 1
    suspects = {
        "Rows and columns have changed places: row i is the output, column j the replaced token.": expected.T,
        "The diagonal is missing: an output depends on its own token.": expected & ~torch.eye(n).bool(),
        "Your changes add up: put the old token back before you replace the next one.": expected.cummax(1).values,
        "Some changes are missed. Do you compare all logits, and exactly?": lacks_cells(expected),
    }
    what = f'the influence matrix of the model "{kind}"'
    try:
        actual = _answered(answer, _model(kind, seed, training=kind == "one ahead"), ids)
    except Mistake as mistake:
        if "IndexError: index out of range" in mistake.came:
            mistake.likely = "Token ids end at vocab_size - 1. Which id follows the last one?"
        raise
    expect_tensor(actual, expected, what, suspects)


@A2.part("a2_verdict", points=3)
def the_word(answer: Answer, variant: Variant) -> None:
    n = variant.whole("verdict", 5, 8)
    full = torch.ones(n, n).bool()
    cases = {
        "The diagonal and everything below it is open: that is causal.": (full.tril(), "causal"),
        "Every cell is open: that is bidirectional.": (full, "bidirectional"),
        "A single cell is open above the diagonal: no longer causal, and not bidirectional.": (
            full.tril() | full.triu(n - 1), "mixed"
        ),
        "Only the next token is open. Do you test one corner only?": (full.tril(1), "mixed"),
        "The matrix is symmetric, but many cells are closed.": (full.tril(1).triu(-1), "mixed"),
        "No later token is open, but no earlier one either.": (torch.eye(n).bool(), "mixed"),
        "Later tokens are open, but no earlier ones.": (full.triu(), "mixed"),
    }  # fmt: skip
    for likely, (matrix, word) in cases.items():
        picture = " / ".join("".join("■" if cell else "·" for cell in row) for row in matrix.tolist())
        expect_equal(answer(matrix), word, f"the verdict on {picture}", likely)


@A2.part("a2_padding", points=1, hidden=True, cases=("padding faint",))
@A2.part("a2_padding", points=3, cases=("unchanged", "open", "unpadded only", "padding open"))
def a_batch(answer: Answer, variant: Variant, kind: str) -> None:
    n, k, seed = variant.whole(f"rows {kind}", 6, 8), variant.whole(f"pads {kind}", 2, 3), variant.seed(f"rows {kind}")
    real = torch.ones(3, n).bool()
    real[1, n - k :] = real[2, :k] = False
    rows, expected = _ids(variant, kind, n) * real, reach(kind, seed, real)
    without_mask = reach(kind, seed, real | True) & real[:, :, None]

    def has_rows_of_padding(actual: Tensor) -> bool:
        return actual.shape == expected.shape and bool(actual[~real].any())

    suspects = {
        "The rows of padding, as outputs, must be False.": has_rows_of_padding,
        "Padding has influence here, as if it were text. Did you pass the attention mask?": without_mask,
        "Row 0 is open only if it is alone. Do all rows go through the model together?": expected
        | real.all(1)[:, None, None],
        "Padding seems to have no influence. Did you replace its ids, and keep its columns?": reach("open", seed, real),
    }
    what = f'the influence in a batch with padding, in the model "{kind}"'
    expect_tensor(_answered(answer, _model(kind, seed), rows, real.long()), expected, what, suspects)


@A2.part("a2_heads", points=2, hidden=True, cases=("one cell",))
@A2.part("a2_heads", points=3, cases=("one layer", "one head"))
def single_heads(answer: Answer, variant: Variant, kind: str) -> None:
    n, seed = variant.whole(f"heads {kind}", 5, 7), variant.seed(f"heads {kind}")
    real = torch.ones(1, n).bool()
    for layer in range(LAYERS):
        expected = (added(kind, seed, layer, real) > CLOSED)[0]
        through_layers = reach(kind, seed, real).expand(HEADS, n, n)
        suspects = {
            "Positions and heads are mixed: `c_proj` receives (n, width), so split the width only.": expected.transpose(
                0, 1
            ).reshape(HEADS, n, n),
            "All heads are equal. Are they mixed, or cut in the wrong places?": expected.any(0).expand(HEADS, n, n),
            "This is the influence through several layers. Where do you change the state?": through_layers,
            "Rows and columns have changed places.": expected.mT,
            "Some changes are missed. LayerNorm removes what all components share.": lacks_cells(expected),
        }
        actual = _answered(answer, _model(kind, seed), _ids(variant, kind, n), layer)
        expect_tensor(actual, expected, f"the influence in layer {layer}, by head,", suspects)


@A2.part("a2_difference", points=1, cases=("labkit", *COMPONENTS), hidden=True)
@A2.part("a2_difference", points=2, cases=("open", "by hand", "late position", "forgets-scaling", "weights scaled"))
def the_mask_put_back(answer: Answer, variant: Variant, kind: str) -> None:
    seed = variant.seed(f"same {kind}")
    places = dict.fromkeys(("late position", *COMPONENTS), 0)
    first = (places | {"forgets-scaling": 1, "weights scaled": 1 + faulty_layer(seed)}).get(kind)
    suspects = {LIKELY[kind]: lambda actual: True}
    if first is not None and kind not in COMPONENTS:
        suspects = {
            "This is the last state that differs. A fault changes all later states, too.": LAYERS,
            "Count from 0: number 0 is the sum of the embeddings, number 1 the state after the first block.": (
                lambda actual: actual in (first - 1, first + 1)
            ),
        } | suspects
    actual = _answered(answer, _model("unchanged", seed), _model(kind, seed), _ids(variant, kind, 8))
    what = f"the first difference of {'a correct' if first is None else 'a faulty'} model"
    expect_equal(actual, first, what, suspects)


@A2.part("a2_packed", points=1)
def the_positions(answer: Answer, variant: Variant) -> None:
    documents, positions = _documents(variant)
    real, n = documents > 0, documents.shape[1]
    actual = torch.as_tensor(answer(documents)[1])
    expect(actual.shape == (3, n), f"positions of shape {(3, n)}", f"shape {tuple(actual.shape)}")
    likely = "Padding needs a valid position, too."
    expect(bool((actual >= 0).all()), "positions of at least 0", f"{int(actual.min())}", likely)
    suspects = {
        "These positions ignore the documents. Each document starts at 0.": torch.arange(n).expand(3, n)[real],
        "Only padding is left out of the count. Each document starts at 0.": (real.cumsum(1) - 1)[real],
        "The first token of a document has position 0, not 1.": positions[real] + 1,
    }
    what = f"the positions of the real tokens in {documents.tolist()}"
    expect_tensor(actual[real], positions[real], what, suspects)


@A2.part("a2_packed", points=3, cases=("unchanged", "large scores"))
def the_mask(answer: Answer, variant: Variant, kind: str) -> None:
    documents, positions = _documents(variant)
    real, n = documents > 0, documents.shape[1]
    mask = torch.as_tensor(answer(documents)[0])
    expect(mask.shape == (3, 1, n, n), f"a mask of shape {(3, 1, n, n)}", f"shape {tuple(mask.shape)}")
    likely = "Eager attention adds its mask to the scores, and True counts as 1. What number must be added?"
    expect(mask.is_floating_point(), "a mask of real numbers", str(mask.dtype), likely)
    likely = "A mask that is added must have the dtype of the scores, here float32."
    expect(mask.dtype == torch.float32, "a mask of torch.float32", str(mask.dtype), likely)
    original, ids = model(kind, variant.seed(f"mask {kind}"), attn="eager"), _ids(variant, "mask", n).expand(3, n)
    others, padding = (documents[:, :, None] != documents[:, None, :])[:, None], ~real[:, None, None, :]
    none = torch.zeros(3, 1, n, n).bool()

    @torch.no_grad()
    def logits(closed: Tensor, score: float = CLOSED, zero: Tensor | float = 0.0) -> Tensor:
        added_to_scores = (torch.zeros(3, 1, n, n) + zero).masked_fill(closed, score)
        return original(input_ids=ids, attention_mask=added_to_scores, position_ids=positions).logits[real]

    suspects = {
        "A row of nothing but -inf has no softmax. Which key can padding attend to?": not_finite,
        "The documents attend to each other: only padding is closed.": logits(padding | none),
        "Padding is open. It is in no document.": logits(others & ~padding),
        "Ones and zeros are added to the scores, so a closed key is only a little less likely.": logits(~others, 1.0),
        "The pairs of the same document are closed and the others are open.": logits(~others),
        "The mask is still causal.": logits(others | torch.ones(n, n).bool().triu(1)),
        "-10000 is not low enough for these scores.": logits(others, -1e4),
    }
    expect_tensor(logits(none, zero=mask), logits(others), "the logits under your mask", suspects, 1e-4)


KNOWN = ("labkit", "by hand", "unchanged", "unpadded only", "one layer", "padding open", "forgets-scaling")
BY_MASK = ("evaluation only", "training only", "padded only", "one ahead", "padding faint", "open")
BY_HEADS = ("one head", "open", "one cell", "faint future", "weights scaled", "quiet head")  # or by logits


@A2.part("a2_audit", points=4, cases=KNOWN)
def attacks(answer: Answer, variant: Variant, kind: str) -> None:
    if variant.round:
        return  # an audit takes time, and one round has models enough
    seed, training = variant.seed(f"audit {kind}"), bool(variant.whole(f"mode {kind}", 0, 1))
    original = "quiet original" if kind in QUIET else "unchanged"
    judgement = _answered(answer, _model(kind, seed, training=training), _model(original, seed))
    correct = kind in CORRECT
    likely = REJECTED if kind == "labkit" else LIKELY[kind]
    expect_equal(judgement, correct, f"the audit of {'a correct' if correct else 'a faulty'} model", likely)


@A2.part("a2_audit", points=2, cases=BY_MASK, hidden=True)
def more_masks_and_modes(answer: Answer, variant: Variant, kind: str) -> None:
    attacks(answer, variant, kind)


@A2.part("a2_audit", points=2, cases=BY_HEADS, hidden=True)
def more_heads_and_logits(answer: Answer, variant: Variant, kind: str) -> None:
    attacks(answer, variant, kind)


REJECTED = (
    "This conversion is correct. Is `original` under a full mask, and are pads left out of the logits that you compare?"
)
CORRECT = ("open", "labkit", "by hand")
LIKELY = {  # the probable cause of a wrong answer about a model of this kind
    "open": "Only its mask is changed. Which mask is in force when you compare?",
    "labkit": "This conversion is correct. Which mask is in force when you compare, and which test does it fail?",
    "by hand": "It computes the same sums in another order, so last bits differ. Is your comparison exact?",
    "unchanged": "It was never converted: every layer is causal.",
    "forgets-scaling": "Its weights are right, but it computes something else. Do you compare the computation?",
    "weights scaled": "Its numbers differ only a little. Do you compare all of them, one by one?",
    "late position": "Only late positions differ. Which positions do you compare?",
    "component up": "One component is larger by 0.01, and no other differs. Is each absolute difference compared?",
    "component down": "One component is smaller by 0.01, and no other differs. Is each absolute difference compared?",
    "unpadded only": "It is open alone, and causal beside a padded row. Do you test a padded batch?",
    "padded only": "It is open beside a padded row only. Do you test a row alone?",
    "one layer": "One open layer opens all outputs. Do you test layer by layer?",
    "one head": "Open heads hide the closed ones. Do you test each head?",
    "quiet head": "One head is causal, and it adds too little to change the logits by 1e-4. Do you test the heads?",
    "one cell": "In one layer one cell is closed. Do you test every cell?",
    "padding open": "Its tokens depend on padding. Do you replace padding?",
    "padding faint": "Padding is closed with -12, so it still has a little influence. Are small changes ignored?",
    "faint future": "The future is open, but gets too little weight. Which logits are right?",
    "evaluation only": "It is open in evaluation only. Do you test both modes?",
    "training only": "It is open in training only. Do you test both modes?",
    "one ahead": "Each token attends to one later token only. Do you test for a full matrix?",
}


def _documents(variant: Variant) -> tuple[Tensor, Tensor]:
    """Packed rows and their positions, (3, n) each: padding on the right, none, padding on the left."""
    rng = variant.rng("documents")
    a, b, c = rng.sample(range(1, 9), 3)
    x, y, z = (rng.randint(2, 3) for _ in range(3))
    rows = [[a] * x + [b] * y + [0] * z, [c] * x + [a] * y + [b] * z, [0] * x + [c] * (y + z)]
    return torch.tensor(rows), torch.tensor([[i - row.index(number) for i, number in enumerate(row)] for row in rows])


def _answered(answer: Answer, settings: dict[str, Any], *arguments: Any) -> Any:
    """What the answer returns for a model with these settings and more, all of which it must leave as they are."""
    before = state(model(**settings), *arguments)  # first: loading transformers must not use up the answer's time
    result, after = answer(settings, *arguments, function="on_models")
    likely = "Hooks, modes and weights that you change for a measurement must be restored."
    for name in ("number of hooks", "training mode", "checksum of the weights"):
        expect(after[name] == before[name], f"the {name} to be {before[name]} as before", f"{after[name]}", likely)
    likely = "Your function writes into its argument. Did you clone it?"
    expect(after["ids"] == before["ids"], "the ids to be left as they were", f"{after['ids']}", likely)
    return result


def _model(kind: str, seed: int, **more: Any) -> dict[str, Any]:
    return {"kind": kind, "seed": seed, **more}


def _ids(variant: Variant, name: str, n: int) -> Tensor:
    """n different token ids, (1, n); the lowest, which are special, and the highest are left out."""
    return torch.tensor([variant.rng(f"ids {name}").sample(range(10, VOCABULARY - 10), n)])
