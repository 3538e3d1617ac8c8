"""Paraphrase fusion on tiny models: methods against plain prompts, engines against each other and properties."""

from dataclasses import replace

import pytest
import torch

import labkit
from labkit import fusion
from labkit.errors import DataError, ModelError
from labkit.fusion import engine as engines
from labkit.fusion.generation import make_engine
from labkit.fusion.layout import prompts, token_ids
from labkit.fusion.methods import METHODS

NAMES = ("tiny-gpt2", "tiny-llama", "tiny-gemma2", "tiny-gemma3")
EXACT = ("tiny-gpt2", "tiny-llama", "tiny-gemma3")  # Gemma 2 is eager, whose softmax is in single precision
PREFIX = "the token of the model is past. the word: and the mask of it is that you can not see. "
QUESTIONS = [
    ["the capital of France is the city that you all know", "Paris was the city"],
    ["money on the bank of river"],
    ["the cat sat", "the mat sat on one", "look at the past and the future"],
]
WEIGHTS = [[2.0, 1.0], [1.0], [1.0, 2.0, 3.0]]
TOLERANCE = 2e-5


def answered(lm, method="fuse", engine="fast", questions=QUESTIONS, **settings):
    given = {"weights": WEIGHTS[: len(questions)]} if method == "weighted" else {}
    given |= {"prefix": PREFIX, "cue": "word:", "max_new_tokens": 5} | settings
    return fusion.generate(lm, questions, method, engine, **given)


def gap(one, other):
    return float((one - other).abs().max() / other.abs().max())


def plain(lm, *pieces):
    """The model's own logits after these pieces of text, each tokenised alone."""
    ids = lm.tokenizer("")["input_ids"][:1] + [
        token
        for piece in (PREFIX, *pieces, "word:")
        for token in lm.tokenizer(piece, add_special_tokens=False)["input_ids"]
    ]
    with torch.no_grad():
        return lm.model(torch.tensor([ids])).logits[:, -1]


def state_of(model):
    """Settings, modes, hooks, replaced methods and weights."""
    configs = (model.config, model.generation_config)
    state = {repr(config.to_dict()) for config in configs} | {model.config._attn_implementation}
    for path, module in model.named_modules():
        own = [value for value in vars(module).values() if callable(value)]
        parts = [type(module).forward, *module._forward_hooks.values(), *module._forward_pre_hooks.values(), *own]
        state.add(f"{path} {module.training} {[id(part) for part in parts]}")
    return state | {f"{name} {float(weight.double().sum())!r}" for name, weight in model.state_dict().items()}


# ---- properties of an engine ----------------------------------------------------------------------------------------


def require_properties(lm, engine, paraphrases=QUESTIONS[2]):
    """The properties of the method "fuse", whatever the engine."""
    prefix, (segments,), cue = token_ids(lm.tokenizer, [paraphrases], PREFIX, "word:")
    model, limit = lm.model.eval(), 1e-10 if lm.model.dtype == torch.float64 else TOLERANCE
    vocabulary, layers = model.config.vocab_size, engines.fusable_decoder(model).layers

    def read(segments):
        """The logits, and of the tokens of all calls what enters the first layer and what leaves the last one."""
        inputs, states = [], []

        def keep(layer, args, output):
            states.append((output[0] if isinstance(output, tuple) else output).flatten(0, 1))

        hooks = [
            layers[0].register_forward_pre_hook(lambda layer, args: inputs.append(args[0].flatten(0, 1))),
            layers[-1].register_forward_hook(keep),
        ]
        logits = make_engine(engine, model, prompts(METHODS["fuse"], prefix, [segments], cue)).start()
        for hook in hooks:
            hook.remove()
        return logits, torch.cat(inputs), torch.cat(states)

    with torch.no_grad():
        logits, inputs, states = read(segments)
        for segment in segments:
            alone = model(torch.tensor([[*prefix, *segment, *cue]])).logits[:, -1]
            assert gap(read([segment] * 4)[0], alone) <= limit, "copies are not one plain prompt"
        own, moved = [], []  # for each paraphrase the tokens that are its own, and those whose state depends on it
        for number in range(len(segments)):
            changed = [list(segment) for segment in segments]
            changed[number] = [(token + 1) % vocabulary for token in segments[number]]
            other_logits, other_inputs, other_states = read(changed)
            assert gap(other_logits, logits) > 0, "the first token does not depend on every paraphrase"
            own.append((other_inputs != inputs).any(-1))
            moved.append((other_states != states).any(-1))
        for number, changed in enumerate(moved):
            others = torch.stack([tokens for n, tokens in enumerate(own) if n != number]).any(0)
            assert not (changed & others & ~own[number]).any(), "a paraphrase attends to another"


@pytest.mark.matrix
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("engine", "settings"),
    [("fast", {}), ("fast", {"dtype": "float64"}), ("dense", {}), ("dense", {"attn": "eager"}), ("reference", {})],
)
def test_every_engine_has_the_properties(name, engine, settings):
    if name == "tiny-gemma2":  # its eager attention computes the softmax in single precision
        settings = {}
    require_properties(labkit.load(name, **settings), engine)


@pytest.mark.gemma
@pytest.mark.parametrize("name", ["smollm2-135m", pytest.param("gemma3-270m", marks=pytest.mark.slow)])
def test_the_properties_hold_on_real_models_and_engines_agree(name):
    lm = labkit.load(name, dtype="float32", device="cpu")
    asked = ["Which city is the capital of France?", "France's capital is which city?"]
    require_properties(lm, "fast", asked)
    fast, reference = (answered(lm, "fuse", engine, [asked], max_new_tokens=3) for engine in ("fast", "reference"))
    assert gap(fast.first_logits, reference.first_logits) <= TOLERANCE and fast.tokens == reference.tokens


# ---- engines ------------------------------------------------------------------------------------------------------


@pytest.mark.matrix
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("method", fusion.METHODS)
def test_all_engines_agree_also_on_single_questions_and_the_result_names_the_engine(name, method):
    lm = labkit.load(name)
    dense = answered(lm, method, "dense")
    others = {"fast": "fast", "cacheless": "reference (dense, without cache)", "reference": "reference (flex)"}
    for engine, reported in others.items() if method == "fuse" else list(others.items())[:2]:
        other = answered(lm, method, engine)
        assert gap(other.first_logits, dense.first_logits) < TOLERANCE
        assert other.tokens == dense.tokens and other.engine == reported
    assert dense.engine == "reference (dense)" and dense.first_logits.shape == (3, lm.model.config.vocab_size)
    apart = answered(lm, method, batch_size=1)
    assert apart.tokens == dense.tokens
    assert gap(apart.first_logits, dense.first_logits) < TOLERANCE and apart.votes == dense.votes


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
@pytest.mark.parametrize("name", ["tiny-llama", "tiny-gemma2"])
def test_the_compiled_flex_reference_agrees(name):
    lm = labkit.load(name, device="cuda")
    flex, fast = answered(lm, engine="reference"), answered(lm)
    assert gap(flex.first_logits, fast.first_logits) < TOLERANCE and flex.tokens == fast.tokens
    assert flex.engine == "reference (flex, compiled)"


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize(("at_once", "row"), [(8192, 128), (40, 128), (40, 1)])
def test_segments_that_share_a_row_or_are_read_in_several_passes_are_what_they_are_alone(
    name, at_once, row, monkeypatch
):
    monkeypatch.setattr(engines, "TOKENS_AT_ONCE", (at_once, at_once))
    monkeypatch.setattr(engines, "SHARED_ROW", row)
    lm = labkit.load(name, dtype="float64")
    words = "one two three four five six seven eight nine ten".split()
    questions = [[" ".join(words[:count]) for count in (10, 7, 3, 2, 1)], ["the word of it " * 20, "one"]]
    fast, dense = (answered(lm, "fuse", engine, questions) for engine in ("fast", "dense"))
    assert gap(fast.first_logits, dense.first_logits) < 1e-10


@pytest.mark.parametrize("engine", ["fast", "reference", "dense"])
def test_the_model_is_as_it_was_also_after_an_exception(engine):
    lm = labkit.load("tiny-gemma3")
    lm.model.train()
    lm.model.model.layers[0].eval()
    before = state_of(lm.model)
    answered(lm, "hidden-average", engine)
    assert state_of(lm.model) == before
    lm.model.lm_head.register_forward_pre_hook(lambda *args: 1 / 0)
    before = state_of(lm.model)
    with pytest.raises(ZeroDivisionError):
        answered(lm, "hidden-average", engine)
    assert state_of(lm.model) == before


# ---- methods ------------------------------------------------------------------------------------------------------


@pytest.mark.matrix
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("engine", ["fast", "dense"])
def test_one_paraphrase_is_the_plain_prompt_in_every_method_and_concat_is_that_of_all(name, engine):
    lm, text = labkit.load(name), QUESTIONS[0][0]
    expected = plain(lm, text + "\n")
    log_probs = expected.log_softmax(-1)
    expected_by_method = {"confidence-average": log_probs, "confidence-max": log_probs + log_probs.max()}
    for method in fusion.METHODS:
        weights = {"weights": [[7.0]]} if method == "weighted" else {}
        logits = answered(lm, method, engine, [[text]], **weights).first_logits
        assert torch.allclose(logits, expected_by_method.get(method, expected), atol=1e-4), method
    texts = plain(lm, *(text + "\n" for text in QUESTIONS[2]))
    assert gap(answered(lm, "concat", engine, QUESTIONS[2:]).first_logits, texts) < TOLERANCE


@pytest.mark.parametrize("method", set(fusion.METHODS) - {"single", "weighted", "majority-vote", "hidden-average"})
def test_the_order_matters_only_where_positions_continue(method):
    lm = labkit.load("tiny-llama")
    here, there = (answered(lm, method, questions=[texts]) for texts in (QUESTIONS[2], QUESTIONS[2][::-1]))
    changed = gap(here.first_logits, there.first_logits)
    assert changed > 1e-3 if method in ("concat", "isolate") else changed < TOLERANCE


def test_equal_weights_are_fuse_and_a_great_weight_is_that_paraphrase_alone():
    lm = labkit.load("tiny-llama", dtype="float64")
    question = ["the cat sat on the mat", "the mat sat on the cat"]  # of one length, so the cue has the same position
    fused = answered(lm, questions=[question]).first_logits
    equal = answered(lm, "weighted", questions=[question], weights=[[3.0, 3.0]])
    assert gap(equal.first_logits, fused) < 1e-10
    great = answered(lm, "weighted", questions=[question], weights=[[1.0, 1e14]])
    assert gap(great.first_logits, answered(lm, "single", questions=[question[1:]]).first_logits) < 1e-10


def test_averages_over_rows_are_those_of_single_answers():
    lm, question = labkit.load("tiny-gpt2"), QUESTIONS[2]
    apart = torch.cat([answered(lm, "single", questions=[[text]]).first_logits for text in question])
    probs = apart.softmax(-1)
    confidence = probs.max(-1, keepdim=True).values
    expected = {
        "logit-average": apart.mean(0),
        "logit-max": apart.max(0).values,
        "confidence-average": (confidence / confidence.sum() * probs.log()).sum(0),
        "confidence-max": (probs * confidence).max(0).values.log(),
    }
    for method, logits in expected.items():
        assert torch.allclose(answered(lm, method, questions=[question]).first_logits[0], logits, atol=1e-4), method


def test_hidden_average_of_the_last_layer_is_the_logits_of_the_mean_state():
    lm = labkit.load("tiny-llama", dtype="float64")
    states, last = [], []
    handle = lm.model.model.layers[-1].register_forward_hook(lambda module, args, out: states.append(out[0, -1]))
    for text in QUESTIONS[2]:
        answered(lm, "single", questions=[[text]], max_new_tokens=1)
        last.append(states[-1])  # at the cue
    handle.remove()
    with torch.no_grad():
        expected = lm.model.lm_head(lm.model.model.norm(torch.stack(last).mean(0)))
    logits = answered(lm, "hidden-average", questions=[QUESTIONS[2]], layer=1).first_logits[0]
    assert gap(logits, expected) < 1e-10


# ---- refusals -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("invalid", "message"),
    [
        ({"questions": ["a b"]}, "question 0 is 'a b'"),
        ({"questions": [["a", " "]]}, "none empty"),
        ({"cue": ""}, "the cue is empty"),
        ({"method": "fusion"}, "'fusion'; choose one of single, concat"),
        ({"weights": [[1.0], [1.0], [1.0]]}, "takes no weights"),
        ({"method": "weighted", "weights": [[1.0, 1.0]]}, "weights for 1 questions, but 3"),
        ({"method": "weighted", "weights": [[1.0, 0.0], [1.0], [1.0] * 3]}, "give one positive number for each"),
        ({"layer": 1}, "with 'hidden-average' only"),
        ({"method": "hidden-average", "layer": 2}, "layer is 2; .* from 0 to 1"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"max_new_tokens": 0}, "must be at least 1"),
        ({"max_new_tokens": 1000}, "1,0.. tokens, and the model has 1,024 positions"),
        ({"stop": ("\n", "")}, "no stop text may be empty"),
    ],
)
def test_invalid_arguments_are_refused(invalid, message):
    with pytest.raises(DataError, match=message):
        answered(labkit.load("tiny-llama"), **invalid)


def test_models_that_cannot_be_fused_are_refused():
    from transformers import BloomConfig, BloomForCausalLM

    lm, flex = labkit.load("tiny-llama"), labkit.load("tiny-llama", attn="flex_attention")
    bloom = BloomForCausalLM(BloomConfig(vocab_size=lm.model.config.vocab_size, hidden_size=32, n_layer=2, n_head=2))
    expected = answered(lm).tokens
    assert answered(flex, engine="reference").tokens == expected
    declared = labkit.load("tiny-llama")
    declared.model.config.is_causal = False
    labkit.to_bidirectional(lm.model)
    refused = {
        "has no tokenizer": replace(flex, tokenizer=None),
        "holds no decoder that labkit knows": replace(lm, model=bloom.eval()),
        "it has no language-model head": replace(flex, model=flex.model.model),
        "call labkit.to_causal first": lm,
        "it is bidirectional": declared,
        "use engine='reference'": flex,
    }
    for message, model in refused.items():
        with pytest.raises((DataError, ModelError), match=message):
            answered(model)
    labkit.to_causal(lm.model)
    assert answered(lm).tokens == expected
