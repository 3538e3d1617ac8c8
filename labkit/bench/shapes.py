"""Models of published shapes with random weights: what a training costs does not depend on what the weights say.

`random:gemma-2-2b` needs no download and no licence. The sizes are those of the model cards and of Gemma 2's report
(arXiv 2408.00118, table 1).
"""

from __future__ import annotations

from typing import Any

from labkit.errors import UnknownModelError

PREFIX = "random:"
SEED = 0
_GEMMA_2 = {"vocab_size": 256_000, "head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 4096}
SHAPES: dict[str, tuple[str, dict[str, int]]] = {
    "gpt2": ("GPT2Config", {}),  # its defaults are GPT-2 124M
    "gemma-2-2b": (
        "Gemma2Config",
        _GEMMA_2
        | {"hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26}
        | {"num_attention_heads": 8, "num_key_value_heads": 4},
    ),
    "gemma-2-9b": (
        "Gemma2Config",
        _GEMMA_2
        | {"hidden_size": 3584, "intermediate_size": 14336, "num_hidden_layers": 42}
        | {"num_attention_heads": 16, "num_key_value_heads": 8},
    ),
}
PARAMETERS = {"gpt2": 124_439_808, "gemma-2-2b": 2_614_341_888, "gemma-2-9b": 9_241_705_984}


def is_random(name: str) -> bool:
    """Whether `name` asks for random weights. Raises UnknownModelError if there is no such shape."""
    if not name.startswith(PREFIX):
        return False
    if name.removeprefix(PREFIX) not in SHAPES:
        known = ", ".join(PREFIX + each for each in SHAPES)
        raise UnknownModelError(f"there is no shape {name!r}; choose one of {known}")
    return True


def build(name: str, head: Any, *, attn: str | None, dtype: str, device: str) -> Any:
    """The model `random:...` with labkit's `head`, made on `device` in `dtype`.

    Raises:
        NotEnoughMemoryError, before anything is allocated. ModelError: the family cannot use this attention backend.
    """
    import torch
    import transformers

    from labkit import hub_models, memory
    from labkit.models import _choose_attention

    is_random(name)
    kind_of_config, sizes = SHAPES[name.removeprefix(PREFIX)]
    config = getattr(transformers, kind_of_config)(**sizes)
    kind, config = hub_models.class_for(config, head, name)
    attn, _ = _choose_attention(kind, config, attn, name)
    memory.require_memory(name, memory.configured_parameters(config, kind), getattr(torch, dtype), device)
    with torch.device(device), torch.random.fork_rng():
        torch.manual_seed(SEED)
        return kind._from_config(config, attn_implementation=attn, dtype=getattr(torch, dtype))
