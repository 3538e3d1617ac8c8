"""Every exhibit x architecture x attention backend x padding, judged by an independent oracle.

The oracle is this file's first half: plain torch, without labkit. It changes one token at a time and compares the
outputs; it also measures single layers, packs two texts into a row, shifts a sentence behind left pads, switches to
training mode, and restores the causal mask to compare the computation with the original's. `labkit.audit` must come to
the same verdicts.
"""

import copy
from functools import cache

import pytest
import torch

from labkit import pitfalls
from labkit.auditing import measure
from labkit.errors import ConversionError, LabkitError
from labkit.models.tiny import build_tiny_model
from labkit.pitfalls import rewrites
from labkit.pitfalls.exhibit import TEXT_FAMILIES
from tests.perturbation import layer_cells, layers_of, stack_of

pytestmark = pytest.mark.matrix

S = 12  # tokens in a row; longer than the window of the local layers, which is 8
PADS = 3
PADDINGS = ("unpadded", "right-padded", "left-padded")
TOLERANCE = 1e-6  # relative; in these models no influence is a difference of exactly 0, an influence one of over 1e-4


# --- the oracle -------------------------------------------------------------------------------------------------------


def real_positions(padding):
    first, last = {"unpadded": (0, S), "right-padded": (0, S - PADS), "left-padded": (PADS, S)}[padding]
    return (torch.arange(S) >= first) & (torch.arange(S) < last)


def call(model, ids, real, entry="top"):
    """Outputs (batch, S, dim), called as careful users do: 2-D mask, positions counted from the first real token."""
    mask = real.long()
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    module = model if entry == "top" else stack_of(model)
    with torch.no_grad():
        out = module(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False)
    return out.logits if entry == "top" else out.last_hidden_state


def rows_with_one_token_changed():
    """Ids (1 + S * 3, S): the sentence, then for each position three copies with another token there; and which."""
    changed = torch.arange(S).repeat_interleave(3)
    rows = torch.arange(40, 40 + S).repeat(1 + 3 * S, 1)
    rows[1 + torch.arange(3 * S), changed] = torch.tensor([7, 111, 222]).repeat(S)
    return rows, changed


def influence(outputs, changed):
    """Bool (S, S): does changing position j (column) change output i (row)? outputs: (1 + n, S, dim), base first."""
    scale = outputs[0].abs().max()
    moved = (outputs[1:] - outputs[0]).abs().amax(-1) > TOLERANCE * scale  # (n, S)
    return torch.stack([moved[changed == j].any(0) for j in range(S)], dim=1)


def measured(model, padding, entry="top"):
    """What the oracle measures for one padding: a code, and the influence among the real tokens.

    The code: c causal, b bidirectional, o other; + pads leak into real tokens; ! NaN.
    """
    ids, changed = rows_with_one_token_changed()
    ids = torch.cat([ids, ids[:1]])  # and one full row, so that a padded batch is a mixed one
    keep = real_positions(padding)
    real = keep.expand(len(ids), S).clone()
    real[-1] = True
    outputs = call(model, ids, real, entry)[:-1]
    nan, full = bool(outputs[:, keep].isnan().any()), influence(outputs, changed)
    matrix = full[keep][:, keep]
    lower = torch.ones_like(matrix).tril()
    future = matrix[~lower]
    letter = "b" if future.all() else "o" if future.any() else "c"
    letter = "o" if nan or not matrix[lower].all() else letter
    return letter + "+" * bool(full[keep][:, ~keep].any()) + "!" * nan, matrix


def codes(model):
    return " ".join(measured(model, padding)[0] for padding in PADDINGS)


def intended_reach(model):
    """What a right conversion gives each layer: everything, or to either side as far as the trained window reached."""
    config = stack_of(model).config
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * len(layers_of(model))
    distance = (torch.arange(S)[:, None] - torch.arange(S)).abs()
    return [distance < (8 if kind == "sliding_attention" else S) for kind in kinds]


def packed_texts_leak(model):
    """Two texts in one row, separated by restarting position_ids alone: does one depend on the other?"""
    ids, changed = rows_with_one_token_changed()
    positions = (torch.arange(S) % (S // 2)).expand(len(ids), S)
    with torch.no_grad():
        outputs = stack_of(model)(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state
    matrix = influence(outputs, changed)
    return bool(matrix[: S // 2, S // 2 :].any() or matrix[S // 2 :, : S // 2].any())


def left_padding_shifts(model):
    """Are the states of a left-padded sentence other than those of the same sentence alone?"""
    ids = torch.arange(40, 40 + S)[None]
    real = real_positions("left-padded")[None]
    alone = call(model, ids[:, PADS:], real[:, PADS:], "stack")
    padded = call(model, ids, real, "stack")[:, PADS:]
    return differ(alone, padded)


def differ(first, second):
    """Beyond rounding? A NaN on either side counts."""
    bound = 1e-5 * float(first.nan_to_num().abs().max())
    return not torch.allclose(first, second, rtol=0, atol=bound)


def neighbours_matter(model):
    """Do the states of a short row depend on whether a full row is behind it, in front of it, or neither?"""
    ids = torch.arange(40, 40 + S).repeat(2, 1)
    short, full = real_positions("right-padded"), real_positions("unpadded")
    behind, before, alone = (
        call(model, ids, torch.stack([short, full]), "stack")[0, : S - PADS],
        call(model, ids, torch.stack([full, short]), "stack")[1, : S - PADS],
        call(model, ids[:1, : S - PADS], short[None, : S - PADS], "stack")[0],
    )
    return differ(behind, before) or differ(behind, alone)


def changes_in_training(model):
    """Is the influence different in training mode? (These models have no dropout.)"""
    student = copy.deepcopy(model).train()
    pairs = [(measured(student, padding, "stack"), measured(model, padding, "stack")) for padding in PADDINGS]
    return any(not torch.equal(training, evaluating) for (_, training), (_, evaluating) in pairs)


def computes_something_else(model, original):
    """With the trained causal mask handed to every layer, are the logits other than the original's? (In eager form.)"""
    ids = torch.arange(40, 40 + S)[None]
    real = torch.ones(1, S, dtype=torch.bool)

    def causal(reach):
        mask = torch.zeros(1, 1, S, S).masked_fill(~reach.tril(), torch.finfo(torch.float32).min)

        def hand_over(module, args, kwargs):
            if len(args) > 2:  # GPT-2's stack passes the mask by position
                return (*args[:2], mask, *args[3:]), kwargs
            return args, {**kwargs, "attention_mask": mask}

        return hand_over

    student = copy.deepcopy(model)
    for layer, reach in zip(layers_of(student), intended_reach(student), strict=True):
        layer.register_forward_pre_hook(causal(reach), with_kwargs=True)
    return differ(call(original, ids, real), call(student, ids, real))


# --- the models ------------------------------------------------------------------------------------------------------

BACKENDS = ("eager", "sdpa")
HERE = [
    (family, backend)
    for family in TEXT_FAMILIES
    for backend in BACKENDS
    if (family, backend) != ("gemma2", "sdpa")  # transformers refuses it: SDPA has no softcap
]
MATRIX = [
    pytest.param(exhibit, family, backend, id=f"{exhibit.name}-{family}-{backend}")
    for exhibit in pitfalls.ALL
    for family, backend in HERE
    if family in exhibit.families
]


@cache
def original(family, backend):
    """One causal model for all tests; nobody may change it."""
    return build_tiny_model(f"tiny-{family.removesuffix('_text')}", attn=backend)


def exhibited(exhibit, family, backend):
    return exhibit.apply(copy.deepcopy(original(family, backend)))


# --- the exhibits against the oracle ---------------------------------------------------------------------------------
# The codes for unpadded, right-padded and left-padded batches, under eager and under SDPA. An exhibit that is not
# listed is bidirectional everywhere.

NEVER, ALWAYS, PADS_LEAK = "c c c", "b b b", "b b+ b+"
NEVER_ANYWHERE = ("use-cache-off", "is-decoder-off", "config-keyword-dropped", "gemma-flag-set-late")
NEVER_ANYWHERE += ("dead-update-causal-mask", "dead-bias-buffer", "training-only")
CLAIMS = dict.fromkeys(NEVER_ANYWHERE, (NEVER, NEVER)) | {
    "layer-flag-off": (NEVER, "b c c"),
    "config-flag-none": (ALWAYS, "c b b"),
    "gemma-flag-at-construction": (NEVER, "b c c"),
    "all-ones-mask-2d": ("c c c+", "c c c+"),
    "all-ones-mask-4d": (PADS_LEAK, PADS_LEAK),
    "inverted-bool-mask": (PADS_LEAK, "o o+ o+"),
    "bool-mask-under-eager": (PADS_LEAK, ALWAYS),
    "query-rows-masked": ("b o! o!", ALWAYS),
    "small-negative-mask": (PADS_LEAK, PADS_LEAK),
    "patched-mask-builder": (ALWAYS, "c b b"),
    "none-mask-in-attention": (PADS_LEAK, "c c c+"),
    "multiplies-scores-by-mask": (PADS_LEAK, PADS_LEAK),
}
IN_ONE_ARCHITECTURE = {  # because of the windows of their local layers
    ("config-flag-none", "gemma3_text", "sdpa"): "o b b",
    ("first-layer-only", "gemma2", "eager"): "o o o",
    ("first-layer-only", "gemma3_text", "eager"): "o o o",
    ("first-layer-only", "gemma3_text", "sdpa"): "o o o",
}


def claim(name, family, backend):
    return IN_ONE_ARCHITECTURE.get((name, family, backend), CLAIMS.get(name, (ALWAYS, ALWAYS))[backend == "sdpa"])


@pytest.mark.parametrize(("family", "backend"), HERE)
def test_oracle_measures_the_untouched_models_as_causal_layer_by_layer(family, backend):
    model = original(family, backend)
    assert codes(model) == NEVER
    for reach, intended in zip(layer_cells(stack_of(model), S)[:, 0], intended_reach(model), strict=True):
        assert torch.equal(reach, intended.tril())
    assert not packed_texts_leak(model)
    assert not left_padding_shifts(model)
    assert not neighbours_matter(model)
    assert not computes_something_else(model, model)


@cache
def faults(family, backend, name):
    """Everything that the oracle has against an exhibit, named as the audit's kinds. Empty: a clean conversion."""
    model = exhibited(pitfalls.get(name), family, backend)
    present = {
        "packing-leak": packed_texts_leak(model),
        "positions shift": left_padding_shifts(model),
        "neighbours matter": neighbours_matter(model),
        "train-eval-mismatch": changes_in_training(model),
        "computation-changed": computes_something_else(model, original(family, backend)),
    }
    for padding in PADDINGS:
        for entry in ("top", "stack"):
            code, _ = measured(model, padding, entry)
            present[f"{code[0]} when {padding}"] = code[0] != "b"
            present["pad-leak"] = present.get("pad-leak") or "+" in code
            present["nan-rows"] = present.get("nan-rows") or "!" in code
    if name != "forgets-scaling":  # its softmax is so sharp that some allowed keys get no measurable weight
        reaches = zip(layer_cells(stack_of(model), S)[:, 0], intended_reach(model), strict=True)
        present["a layer's reach"] = not all(torch.equal(reach, intended) for reach, intended in reaches)
    return frozenset(fault for fault, is_present in present.items() if is_present)


REACHES = {  # of Gemma 3's local layer, to the left and to the right
    "config-flag-alone": (-8, 8),
    "gemma3-flag-at-construction": (-4, 4),
    "gemma3-flag-set-late": (-7, 7),
    "window-without-abs": (-7, S - 1),
    "all-ones-mask-4d": (1 - S, S - 1),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", list(REACHES))
def test_reach_of_gemma3s_local_layer(name, backend):
    local, everywhere = layer_cells(stack_of(exhibited(pitfalls.get(name), "gemma3_text", backend)), S)[:, 0]
    offset, (left, right) = torch.arange(S) - torch.arange(S)[:, None], REACHES[name]  # key - query
    assert torch.equal(local, (left <= offset) & (offset <= right)) and everywhere.all()


@pytest.mark.parametrize(("family", "backend"), HERE)
def test_complete_handwritten_attention_is_the_original(family, backend):
    model = copy.deepcopy(original(family, backend))
    rewrites.rewrite(model)
    assert codes(model) == ALWAYS
    assert not computes_something_else(model, original(family, backend))


FLEX_ON_CPU_CRASHES = {"all-ones-mask-4d", "inverted-bool-mask", "bool-mask-under-eager", "query-rows-masked"}
FLEX_ON_CPU_CRASHES |= {"small-negative-mask"}


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_exhibits_have_the_same_effect_under_flex_attention_as_under_eager(family):
    """One test per family: kernels compile once for all exhibits. Lengths do not vary here, so no dynamic shapes."""
    with torch._dynamo.config.patch(automatic_dynamic_shapes=False):
        for exhibit in pitfalls.ALL:
            if family not in exhibit.families:
                continue
            model = exhibited(exhibit, family, "flex_attention")
            if exhibit.name in FLEX_ON_CPU_CRASHES:
                with pytest.raises(ConversionError, match="crashes the whole process"):
                    measured(model, "unpadded")
            else:
                assert codes(model) == claim(exhibit.name, family, "eager"), exhibit.name


def test_multimodal_gemma3_ignores_the_switch_on_its_top_config(multimodal):
    pitfalls.get("multimodal-top-switch").apply(multimodal)
    assert not layer_cells(multimodal, S).triu(1).any()
    assert measure.audit(multimodal).verdict == "causal"
    multimodal.config.text_config.is_causal = False
    assert layer_cells(multimodal, S)[1].all()


# --- the catalogue ----------------------------------------------------------------------------------------------------


def test_exhibits_refuse_other_architectures_and_unknown_names_get_the_closest_one():
    for exhibit in pitfalls.ALL:
        assert pitfalls.get(exhibit.name) is exhibit and exhibit.code.splitlines()[0] in str(exhibit)
        for family in set(TEXT_FAMILIES) - set(exhibit.families):
            with pytest.raises(ConversionError, match=f"{exhibit.name}.*{family}"):
                exhibit.apply(copy.deepcopy(original(family, "eager")))
    with pytest.raises(LabkitError, match="did you mean 'forgets-rope'"):
        pitfalls.get("forget-rope")


@pytest.mark.parametrize(("exhibit", "family", "backend"), [p for p in MATRIX if p.id.endswith("sdpa")])
def test_exhibit_changes_no_other_model_and_survives_a_copy(exhibit, family, backend):
    sentence = torch.arange(40, 40 + S)[None], torch.ones(1, S, dtype=torch.bool)
    before = call(original(family, backend), *sentence)
    model = exhibited(exhibit, family, backend)
    copied = copy.deepcopy(model)
    expected = call(model, *sentence)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(call(copied, *sentence), expected)
    assert torch.equal(call(original(family, backend), *sentence), before)


# --- the audit against the oracle ------------------------------------------------------------------------------------


@cache
def audited(family, backend, name):
    """The audit's report, with the model that the exhibit was made from as the reference."""
    model = exhibited(pitfalls.get(name), family, backend)
    return measure.audit(model, reference=original(family, backend))


@pytest.mark.parametrize(("exhibit", "family", "backend"), MATRIX)
def test_exhibit_takes_effect_under_the_stated_conditions_and_the_audit_agrees(exhibit, family, backend):
    report, oracle = audited(family, backend, exhibit.name), faults(family, backend, exhibit.name)
    assert codes(exhibited(exhibit, family, backend)) == claim(exhibit.name, family, backend)
    letters = [code[0] for code in claim(exhibit.name, family, backend).split()]
    assert [report.whole[padding].verdict[0] for padding in PADDINGS] == letters
    if len(set(letters)) > 1:
        assert report.verdict in ("mixed", "other")
    assert bool(exhibit.caught_by(report)) == bool(oracle), sorted(oracle)
    expected = oracle & {"pad-leak", "nan-rows", "packing-leak", "train-eval-mismatch"}
    if exhibit in rewrites.EXHIBITS:
        expected |= oracle & {"computation-changed"}
    assert expected <= report.problem_kinds()
    if exhibit.symptom == "computation-changed":  # bidirectional, and only its computation is wrong
        assert "computation-changed" in oracle and not any("when" in fault or fault == "pad-leak" for fault in oracle)


@pytest.mark.parametrize(
    "exhibit", [e for e in pitfalls.ALL if set(e.families) <= set(TEXT_FAMILIES)], ids=lambda e: e.name
)
def test_every_exhibit_has_a_fault_and_the_audit_shows_the_announced_symptom(exhibit):
    """The exception is Gemma 3's late switch: only flash attention, which no CPU runs, reads the flag at fault."""
    conditions = [(family, backend) for family, backend in HERE if family in exhibit.families]
    for family in exhibit.families:
        on_some_backend = any(faults(f, backend, exhibit.name) for f, backend in conditions if f == family)
        assert on_some_backend or exhibit.name == "gemma3-flag-set-late"
    reports = [audited(family, backend, exhibit.name) for family, backend in conditions]
    assert exhibit.symptom in set().union(*(report.problem_kinds() | {report.verdict} for report in reports))


# --- verifications that verify nothing --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("verification", "family"),
    [
        pytest.param(verification, family, id=f"{verification.name}-{family}")
        for verification in pitfalls.VERIFICATIONS
        for family in verification.families
        if (family, verification.backend) in HERE
    ],
)
def test_verification_passes_a_model_that_is_still_causal(verification, family):
    model = exhibited(pitfalls.get(verification.fooled_by), family, verification.backend)
    assert verification.verify(model) is True
    assert "c" in codes(model)
    assert verification.code.splitlines()[0] in str(verification)
