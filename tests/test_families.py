"""Families beside those of the tour: some that need more than the switch, and the page that lists them all."""

import json

import pytest
import torch
import transformers

import labkit
from labkit import masks
from labkit.errors import ConversionError
from scripts import list_families
from tests.perturbation import IDS, N, W, assert_layers_attend, logits, window

pytestmark = pytest.mark.matrix

KEEP_THE_FLAG = ("StableLm", "Nemotron")  # their layers do not pass `is_causal` on to their attention
OPEN = window(None, None)
GEMMA4 = ("Gemma4", "Gemma4Unified")
SIZES = {
    "vocab_size": 300, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "initializer_range": 0.2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LOCAL = {
    "head_dim": 16, "global_head_dim": 16, "sliding_window": W, "vocab_size_per_layer_input": 300,
    "hidden_size_per_layer_input": 8, "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip


def small(family, attn):
    config_class = getattr(transformers, f"{family}TextConfig" if family in GEMMA4 else f"{family}Config", None)
    if config_class is None:
        pytest.skip(f"this transformers has no {family}")
    config = config_class(**SIZES, **(LOCAL if family in GEMMA4 else {}))
    torch.manual_seed(0)
    return getattr(transformers, f"{family}ForCausalLM")._from_config(config, attn_implementation=attn).eval()


@pytest.mark.parametrize("attn", ["eager", "sdpa"])
@pytest.mark.parametrize("family", KEEP_THE_FLAG)
@pytest.mark.parametrize("layers", [None, [1]])
def test_layers_that_keep_the_flag_to_themselves_are_given_their_mask(family, attn, layers):
    model = small(family, attn)
    before = logits(model)
    with labkit.masked(model, masks.bidirectional()):
        assert_layers_attend(model, [OPEN, OPEN])
    labkit.to_bidirectional(model, layers=layers)
    assert_layers_attend(model, [window(None, None if layers is None else 0), OPEN])
    labkit.to_causal(model)
    assert torch.equal(logits(model), before)


def test_their_folder_is_read_back(labkit_command, tmp_path):
    model = small("StableLm", "sdpa")
    model.save_pretrained(tmp_path / "causal")
    code, text, _ = labkit_command("convert", tmp_path / "causal", "--output-dir", tmp_path / "out", "--json")
    assert code == 0 and json.loads(text)["plain_transformers"] is False
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="sdpa").eval()
    expected = logits(labkit.to_bidirectional(model))
    torch.testing.assert_close(logits(labkit.convert.prove_conversion(again)), expected)


def test_flash_attention_which_takes_no_mask_is_refused_for_them(monkeypatch):
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    model = labkit.to_bidirectional(small("StableLm", "sdpa"))
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "flash_attention_2", lambda *_, **__: None)
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ConversionError, match="flash attention takes no mask, and stablelm needs one"):
        logits(model)


@pytest.mark.parametrize("family", ["ctrl", "biogpt", "opt", "gpt_bigcode", "whisper", "bart"])
def test_positions_of_a_table_are_counted_from_the_first_real_token(family):
    sizes = {**list_families.PLAIN, **list_families.OLDER, "max_target_positions": 64, "decoder_start_token_id": 1}
    torch.manual_seed(0)
    config = transformers.CONFIG_MAPPING[family](**sizes)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    ids = torch.nn.functional.pad(IDS, (3, 0))
    causal = logits(model)
    labkit.to_bidirectional(model)
    padded = logits(model, ids, attention_mask=(ids > 0).long())[:, 3:]
    moved = (padded - logits(model)).abs().max()
    assert moved > 1e-2 if family == "bart" else moved < 1e-4  # BART's decoder cannot be told its positions
    assert torch.equal(logits(labkit.to_causal(model)), causal)


def falcon(*, alibi):
    config = transformers.FalconConfig(
        vocab_size=300, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, alibi=alibi, initializer_range=0.2,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.FalconForCausalLM._from_config(config, attn_implementation="sdpa").eval()


@pytest.mark.parametrize("alibi", [False, True])
def test_a_bias_that_comes_in_the_mask_stays_in_it(alibi):
    """Falcon's layers keep the flag too, but are always handed a mask, with the distances of ALiBi in it."""
    model = falcon(alibi=alibi)
    model.config.is_causal = False
    by_transformers = logits(model)
    model.config.is_causal = True
    labkit.to_bidirectional(model)
    torch.testing.assert_close(logits(model), by_transformers, atol=2e-5, rtol=1e-4)
    assert (logits(model, IDS.flip(1)).flip(1) - logits(model)).abs().max() > 0.01  # it knows the order of its words


def test_a_mask_that_would_take_away_such_a_bias_is_refused_and_the_model_is_as_it_was():
    model = falcon(alibi=True)
    before = logits(model)
    with pytest.raises(ConversionError, match="falcon with ALiBi has the distances"):  # noqa: SIM117
        with labkit.masked(model, masks.prefix(3)):
            logits(model)
    with pytest.raises(ConversionError, match="falcon with ALiBi has the distances"):
        labkit.to_bidirectional(model, layers=[1])
    assert torch.equal(logits(model), before)
    with labkit.masked(falcon(alibi=False), masks.bidirectional()) as other:  # its positions are rotated in
        opened = logits(other)
    torch.testing.assert_close(opened, logits(labkit.to_bidirectional(other)))


@pytest.mark.parametrize("attn", ["eager", "sdpa"])
@pytest.mark.parametrize("family", GEMMA4)
@pytest.mark.parametrize(("how", "reach"), [("keep", W - 1), ("halve", W // 2), ("global", None)])
@pytest.mark.parametrize("layers", [None, [0]])
def test_gemma_4_has_the_declared_window_padded_or_not(family, attn, how, reach, layers):
    model = small(family, attn)
    before, asked = logits(model), model.config.get_text_config().use_bidirectional_attention
    labkit.to_bidirectional(model, window=how, layers=layers)
    assert_layers_attend(model, [window(reach, reach), OPEN if layers is None else window(None, 0)])
    labkit.to_causal(model)
    assert torch.equal(logits(model), before)
    assert model.config.get_text_config().use_bidirectional_attention == asked


@pytest.mark.slow
def test_the_page_of_families_is_what_is_measured():
    page = list_families.PAGE.read_text(encoding="utf-8")
    if f"in transformers {transformers.__version__}, " not in page:
        pytest.skip(f"the page is of another transformers than {transformers.__version__}")
    assert list_families.page(list_families.all_outcomes()) == page, "python scripts/list_families.py"


def test_packed_documents_in_a_hybrid_whose_state_runs_along_the_row_are_refused():
    config = transformers.FalconH1Config(**SIZES, head_dim=16, mamba_d_ssm=64, mamba_n_heads=4, mamba_d_head=16)
    model = transformers.FalconH1ForCausalLM(config).eval()
    positions = torch.cat([torch.arange(5), torch.arange(N - 5)])[None]
    with labkit.masked(model, masks.bidirectional()), pytest.raises(ConversionError, match="mix tokens by other means"):
        logits(model, position_ids=positions, use_cache=False)
