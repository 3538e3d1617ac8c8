"""Which causal language models of transformers labkit converts: docs/families.md, by python scripts/list_families.py

Every family behind `AutoModelForCausalLM` is built small, with random weights, on eager and on sdpa attention, and
converted, which measures the mask of every layer, with and without padding; then back, to the same logits bit for bit.
About two minutes.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import pandas as pd  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # noqa: E402
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES  # noqa: E402

import labkit  # noqa: E402
from labkit.errors import ConversionError, ModelError  # noqa: E402
from labkit.files import write_whole  # noqa: E402

PAGE = ROOT / "docs" / "families.md"
BACKENDS = ("eager", "sdpa")
LARGEST = 10_000_000  # parameters
CONVERTS, WITHOUT, UNKNOWN, UNBUILT = "converts", "is not offered", "no decoder", "not built"
PADDED_RIGHT = "converts, and is to be padded on the right"

PLAIN = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 101, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {
    "num_experts": 2, "num_local_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16,
    "n_routed_experts": 2, "top_k_experts": 1,
}  # fmt: skip
OLDER = {
    "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "num_layers": 2, "num_heads": 4, "ffn_dim": 64,
    "d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 64, "rotary_dim": 4,
    "n_inner": 64,
}  # fmt: skip
LATENT = {
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "kv_lora_rank": 16, "q_lora_rank": 16,
    "qk_head_dim": 16, "num_key_value_heads": 4, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip
LOCAL = {
    "vocab_size_per_layer_input": 101, "hidden_size_per_layer_input": 8, "sliding_window": 8, "head_dim": 8,
    "layer_types": ["sliding_attention", "full_attention"], "global_head_dim": 8, "num_kv_shared_layers": 0,
}  # fmt: skip
TRIED = [  # names of sizes differ between families; the first set that builds a small model which runs is taken
    {**PLAIN, **EXPERTS, **OLDER, "head_dim": 8}, {**PLAIN, **EXPERTS, **OLDER}, PLAIN, {**PLAIN, **EXPERTS, **LATENT},
    {**PLAIN, **LOCAL}, {**OLDER, "vocab_size": 101},
]  # fmt: skip


def outcome(family: str, backend: str) -> str:
    """CONVERTS, PADDED_RIGHT, WITHOUT, UNKNOWN, UNBUILT, or why labkit refuses it."""
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family]
    model_class = getattr(transformers, name if isinstance(name, str) else name[0])
    if backend == "sdpa" and not getattr(model_class, "_supports_sdpa", False):
        return WITHOUT
    model = _small(model_class, CONFIG_MAPPING[family], backend)
    if model is None:
        return UNBUILT
    try:
        before = _logits(model)
        labkit.to_bidirectional(model)
        moved = (_logits(model, pads=3) - _logits(model)).abs().max()
        labkit.to_causal(model)
    except ModelError:
        return UNKNOWN
    except ConversionError as error:
        return " ".join(str(error).split()).removesuffix(" The model was put back as it was.")
    if not torch.equal(before, _logits(model)):
        return "converted back, its logits differ"
    return CONVERTS if moved < 1e-3 else PADDED_RIGHT


def _small(model_class: Any, config_class: Any, backend: str) -> Any:
    for sizes in TRIED:
        try:
            config = config_class(**sizes)
            with torch.device("meta"):
                empty = model_class._from_config(config)
            if sum(parameter.numel() for parameter in empty.parameters()) > LARGEST:
                continue
            torch.manual_seed(0)
            model = model_class._from_config(config, attn_implementation=backend).eval()
            _logits(model)
        except Exception:  # whatever a family has against sizes that are not its own
            continue
        return model
    return None


def _logits(model: Any, pads: int = 0) -> torch.Tensor:
    """Of nine tokens, with so many pads before them, which the mask hides."""
    ids = torch.nn.functional.pad(torch.arange(3, 12)[None], (pads, 0))
    with torch.no_grad():
        return model(ids, **({"attention_mask": (ids > 0).long()} if pads else {})).logits[:, pads:]


def page(outcomes: Mapping[str, Mapping[str, str]]) -> str:
    """The page, of {family: {backend: outcome}}."""
    right = _all_of(outcomes, PADDED_RIGHT)
    table = pd.DataFrame.from_dict(outcomes, orient="index").replace(PADDED_RIGHT, CONVERTS)
    eager, sdpa = (set(table.index[table[backend] == CONVERTS]) for backend in BACKENDS)
    without = set(table.index[table["sdpa"] == WITHOUT])
    refused = [
        (family, backend, why)
        for family, row in table.iterrows()
        for backend, why in row.items()
        if why not in (CONVERTS, WITHOUT, UNKNOWN, UNBUILT)
    ]
    names = {family for family, _, _ in refused}
    lines = [
        "# Which families labkit converts", "",
        f"Of the {len(outcomes)} families of causal language models in transformers {transformers.__version__}, labkit "
        f"converts {len(eager)} on eager and {len(sdpa)} on sdpa attention.",
        "Each family was tried with a small model with random weights. labkit converted all its layers, keeping their",
        "windows, and measured the mask of every layer on short texts, with and without padding. Converted back, the",
        "model had to compute the same logits, bit for bit. `python scripts/list_families.py` writes this page, and",
        "`make test-all` compares it with the code if this version of transformers is installed.", "",
        "Only attention is converted. Recurrent or convolutional layers of a hybrid model still run from left to",
        "right, and a family that selects some keys of a long text still does so. Here LFM2 has attention in every",
        "layer; its released models have other layers too, and labkit refuses them.", "",
        f"**Converted on both backends:** {_named(eager & sdpa)}.", "",
        f"**Converted on eager; transformers offers no sdpa:** {_named(eager & without)}.", "",
        f"**Converted on eager, refused on sdpa:** {_named(names & eager)}. "
        f"**Converted on sdpa, refused on eager:** {_named(names & sdpa)}.", "",
        f"**Pad these on the right:** {_named(right)}. They count positions without regard to padding, so padding on "
        "the left changes their states, also while they are causal.", "",
        "**Refused**, with the reason; a refused model is not changed:", "",
        "| family | backend | why |", "|---|---|---|",
        *(f"| {family} | {backend} | {why} |" for family, backend, why in refused), "",
        "**No decoder that labkit can convert** (encoders used as decoders, recurrent models, and older models):",
        f"{_named(_all_of(outcomes, UNKNOWN) - eager - sdpa)}.", "",
        "**Not tried,** because none of the tried sizes gives a small model that runs:",
        f"{_named(_all_of(outcomes, UNBUILT) - eager - sdpa)}.",
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def _all_of(outcomes: Mapping[str, Mapping[str, str]], kind: str) -> set[str]:
    return {family for family, by_backend in outcomes.items() if kind in by_backend.values()}


def _named(families: Iterable[str]) -> str:
    return ", ".join(f"`{family}`" for family in sorted(families)) or "none"


def all_outcomes() -> dict[str, dict[str, str]]:
    families = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    outcomes = {}
    for number, family in enumerate(families, 1):
        print(f"\r{number} of {len(families)}: {family:30}", end="", file=sys.stderr)
        outcomes[family] = {backend: outcome(family, backend) for backend in BACKENDS}
    print(file=sys.stderr)
    return outcomes


def main() -> None:
    if sys.argv[1:]:
        sys.exit(__doc__)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    write_whole(PAGE, page(all_outcomes()))
    print(f"{PAGE.relative_to(ROOT)} written")


if __name__ == "__main__":
    main()
