"""The rule of precision, on every kind of machine, without any of them."""

from __future__ import annotations

import pytest
import torch

from labkit.errors import TrainingError
from labkit.models.precision import choose, kernels

T4, V100, A100, H100 = (7, 5), (7, 0), (8, 0), (9, 0)


@pytest.mark.parametrize(
    ("model_type", "capability", "dtype", "tf32"),
    [
        ("gemma3_text", None, "float32", False),
        ("gpt2", None, "float32", False),
        ("gemma3_text", T4, "float32", False),  # no bfloat16 there, and float16 overflows
        ("gemma2", V100, "float32", False),
        ("gemma", T4, "float32", False),
        ("gpt2", T4, "float16", False),
        ("llama", V100, "float16", False),
        ("gemma3_text", A100, "bfloat16", True),
        ("gpt2", H100, "bfloat16", True),
    ],
)
def test_the_rule(model_type, capability, dtype, tf32):
    chosen = choose(model_type, capability)
    assert (chosen.dtype, chosen.tf32) == (dtype, tf32)


@pytest.mark.parametrize(
    ("model_type", "capability", "message"),
    [
        ("gemma3_text", T4, r"gemma3_text overflows in float16 .*choose float32"),
        ("gemma2", A100, "choose bfloat16"),
        ("gpt2", None, "float16 needs a GPU"),
    ],
)
def test_float16_is_refused_where_it_ends_in_nan(model_type, capability, message):
    with pytest.raises(TrainingError, match=message):
        choose(model_type, capability, "float16")


def test_an_explicit_choice_is_kept():
    assert choose("gpt2", T4, "float16").dtype == "float16"
    assert choose("gpt2", A100, "float32").tf32 and not choose("gpt2", T4, "float32").tf32
    assert choose("gpt2", None, "bfloat16").dtype == "bfloat16"


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


def test_products_that_were_set_by_the_newer_name_are_set_by_it_again(monkeypatch):
    def mixed():
        raise RuntimeError("mix of the legacy and new APIs")

    monkeypatch.setattr(torch, "get_float32_matmul_precision", mixed)
    monkeypatch.setattr(torch, "set_float32_matmul_precision", lambda to: pytest.fail("set by the older name"))
    with kernels(True):
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    assert torch.backends.cuda.matmul.fp32_precision == "none"
