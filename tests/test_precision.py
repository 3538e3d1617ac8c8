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


def test_float16_is_refused_where_it_ends_in_nan():
    with pytest.raises(TrainingError, match=r"gemma3_text overflows in float16 .*choose float32"):
        choose("gemma3_text", T4, "float16")
    with pytest.raises(TrainingError, match=r"choose bfloat16"):
        choose("gemma2", A100, "float16")
    with pytest.raises(TrainingError, match="float16 needs a GPU"):
        choose("gpt2", None, "float16")
    assert choose("gpt2", T4, "float16").dtype == "float16"


def test_what_is_asked_for_is_what_is_taken():
    assert choose("gpt2", A100, "float32").tf32
    assert choose("gpt2", None, "bfloat16").dtype == "bfloat16"
    assert not choose("gpt2", T4, "float32").tf32


@pytest.mark.parametrize("tf32", [True, False])
def test_kernels_are_set_for_the_block_and_as_before_after_it(tf32):
    """cuDNN's attention is off in it: its gradients can be NaN under a mask."""
    before = found()
    assert before == (True, "highest", "none", "none")
    with pytest.raises(ZeroDivisionError), kernels(tf32):
        assert found()[:2] == (False, "high" if tf32 else "highest")
        raise ZeroDivisionError
    assert found() == before


def found():
    backends = torch.backends
    products = torch.get_float32_matmul_precision()
    return (
        backends.cuda.cudnn_sdp_enabled(),
        products,
        *(of.matmul.fp32_precision for of in (backends.cuda, backends.mkldnn)),
    )


def test_where_somebody_has_set_products_by_the_newer_name_it_is_used(monkeypatch):
    def mixed():
        raise RuntimeError("mix of the legacy and new APIs")

    monkeypatch.setattr(torch, "get_float32_matmul_precision", mixed)
    monkeypatch.setattr(torch, "set_float32_matmul_precision", lambda to: pytest.fail("set by the older name"))
    with kernels(True):
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    assert torch.backends.cuda.matmul.fp32_precision == "none"
