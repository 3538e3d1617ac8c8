"""The rule of precision, on every kind of machine, without any of them."""

from __future__ import annotations

import pytest
import torch

from labkit.errors import TrainingError
from labkit.models.precision import choose, kernels

T4, V100, A100, H100 = (7, 5), (7, 0), (8, 0), (9, 0)


@pytest.mark.parametrize(
    ("model_type", "capability", "asked", "dtype", "tf32"),
    [
        ("gemma3_text", None, "auto", "float32", False),
        ("gemma3_text", T4, "auto", "float32", False),  # no bfloat16 there, and float16 overflows
        ("gemma", V100, "auto", "float32", False),
        ("gpt2", T4, "auto", "float16", False),
        ("gemma3_text", A100, "auto", "bfloat16", True),
        ("gpt2", H100, "auto", "bfloat16", True),
        ("gpt2", T4, "float16", "float16", False),
        ("gpt2", A100, "float32", "float32", True),
        ("gpt2", T4, "float32", "float32", False),
        ("gpt2", None, "bfloat16", "bfloat16", False),
    ],
)
def test_the_rule_and_explicit_choices(model_type, capability, asked, dtype, tf32):
    chosen = choose(model_type, capability, asked)
    assert (chosen.dtype, chosen.tf32) == (dtype, tf32)


@pytest.mark.parametrize(
    ("model_type", "capability", "message"),
    [
        ("gemma3_text", T4, r"gemma3_text overflows in float16, .*choose float32"),
        ("gemma2", A100, "choose bfloat16"),
        ("gpt2", None, "float16 needs a GPU"),
    ],
)
def test_float16_is_refused_where_it_ends_in_nan(model_type, capability, message):
    with pytest.raises(TrainingError, match=message):
        choose(model_type, capability, "float16")


def settings():
    cuda, mkldnn = torch.backends.cuda, torch.backends.mkldnn
    products = torch.get_float32_matmul_precision()
    return cuda.cudnn_sdp_enabled(), products, cuda.matmul.fp32_precision, mkldnn.matmul.fp32_precision


@pytest.mark.parametrize("tf32", [True, False])
def test_kernels_are_set_for_the_block_and_restored_after_it(tf32):
    """cuDNN's attention is off in it: its gradients can be NaN under a mask."""
    before = settings()
    with pytest.raises(ZeroDivisionError), kernels(tf32):
        assert settings()[:2] == (False, "high" if tf32 else "highest")
        raise ZeroDivisionError
    assert settings() == before == (True, "highest", "none", "none")
