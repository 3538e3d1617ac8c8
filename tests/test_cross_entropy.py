"""The loss that never holds all logits: equal to torch's in value and gradient, and smaller."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from labkit import cross_entropy
from labkit.cross_entropy import linear_cross_entropy

OURS, TORCHS = linear_cross_entropy, lambda x, w, t: F.cross_entropy((x @ w.T).flatten(0, -2).float(), t.flatten())


def setting(rows=(3, 37), width=16, vocab=50, dtype=torch.float32, seed=0):
    rng = torch.Generator().manual_seed(seed)
    hidden = torch.randn(*rows, width, generator=rng).to(dtype).requires_grad_()
    head = torch.randn(vocab, width, generator=rng).to(dtype).requires_grad_()
    return hidden, head, torch.randint(vocab, rows, generator=rng)


def differentiated(loss, hidden, head, targets):
    value = loss(hidden, head, targets)
    return value.detach(), *torch.autograd.grad(3 * value, (hidden, head))


def worst(ours, theirs):
    return max(float((a.float() - b.float()).norm() / b.float().norm()) for a, b in zip(ours, theirs, strict=True))


@pytest.fixture(autouse=True)
def even_few_logits_are_cut(monkeypatch):
    monkeypatch.setattr(cross_entropy, "FEW", 0)


@pytest.fixture(params=[256, 10, 1, 111, 110])
def rows_at_a_time(request, monkeypatch):
    monkeypatch.setattr(cross_entropy, "ROWS_ON_CPU", request.param)


@pytest.mark.parametrize("left_out", [0, 1, 40, 110])
@pytest.mark.usefixtures("rows_at_a_time")
def test_value_and_gradients_are_torchs_whatever_is_not_counted_and_however_it_is_cut(left_out):
    hidden, head, targets = setting()
    targets.view(-1)[torch.randperm(111)[:left_out]] = -100
    args = hidden, head, targets
    assert worst(differentiated(OURS, *args), differentiated(TORCHS, *args)) < 1e-6


@pytest.mark.usefixtures("rows_at_a_time")
def test_it_is_the_derivative_in_double_precision():
    hidden, head, targets = setting((2, 5), 4, 6, torch.float64)
    targets[1, 2] = -100
    assert torch.autograd.gradcheck(lambda x, w: OURS(x, w, targets), (hidden, head), eps=1e-6, atol=1e-6)


def test_compiled_it_has_torchs_gradients_too():
    """Under torch 2.11 they were zero, and the loss was right."""
    args = setting()
    torch.compiler.reset()
    compiled = torch.compile(inspect.unwrap(OURS), backend="aot_eager", fullgraph=True)
    assert worst(differentiated(compiled, *args), differentiated(TORCHS, *args)) < 1e-6


def test_a_wide_vocabulary_is_taken_in_fewer_rows_at_a_time(monkeypatch):
    monkeypatch.setattr(cross_entropy, "MOST", 100)  # two rows of 50
    args, sizes, plain = setting(), [], Tensor.log_softmax
    monkeypatch.setattr(Tensor, "log_softmax", lambda scores, dim: sizes.append(len(scores)) or plain(scores, dim))
    assert worst(differentiated(OURS, *args), differentiated(TORCHS, *args)) < 1e-6
    assert sizes == [2] * 55 + [1]


def test_nothing_to_count_is_nan_as_in_torch():
    hidden, head, targets = setting()
    value = OURS(hidden, head, torch.full_like(targets, -100))
    assert bool(value.isnan()) and bool(TORCHS(hidden, head, torch.full_like(targets, -100)).isnan())


def test_scores_of_any_size_are_no_overflow():
    hidden, head, targets = setting()
    with torch.no_grad():
        hidden *= 1e4
    assert worst(differentiated(OURS, hidden, head, targets), differentiated(TORCHS, hidden, head, targets)) < 1e-6


@pytest.mark.parametrize("frozen", ["hidden", "head", "both"])
def test_what_is_frozen_gets_no_gradient_and_the_rest_its_own(frozen):
    hidden, head, targets = setting()
    expected = dict(zip(("hidden", "head"), differentiated(TORCHS, hidden, head, targets)[1:], strict=True))
    free = {"hidden": hidden, "head": head}
    for name in ("hidden", "head"):
        if frozen in (name, "both"):
            free.pop(name).requires_grad_(False)
    value = OURS(hidden, head, targets)
    assert value.requires_grad == bool(free)
    for name, each in free.items():
        (grad,) = torch.autograd.grad(3 * value, each, retain_graph=True)
        assert torch.allclose(grad, expected[name], atol=1e-6)


@pytest.mark.usefixtures("rows_at_a_time")
def test_under_autocast_it_is_as_near_to_float32_as_torch_is():
    args = setting(rows=(400,), width=64, vocab=300)
    exact = differentiated(TORCHS, *args)
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = (differentiated(each, *args) for each in (OURS, TORCHS))
    assert [each.dtype for each in ours] == [torch.float32] * 3
    for a, b, c in zip(ours, theirs, exact, strict=True):
        assert (a - c).norm() < 1.2 * (b - c).norm() + 1e-6
    assert worst(ours, exact) > 1e-5  # it was computed in bfloat16


def test_a_model_in_bfloat16_gets_gradients_in_bfloat16():
    hidden, head, targets = setting(dtype=torch.bfloat16)
    ours = differentiated(OURS, hidden, head, targets)
    assert [each.dtype for each in ours] == [torch.float32, torch.bfloat16, torch.bfloat16]
    assert worst(ours, differentiated(TORCHS, *(setting()))) < 0.02


def test_a_second_derivative_is_refused_and_not_wrong():
    hidden, head, targets = setting()
    (grad,) = torch.autograd.grad(OURS(hidden, head, targets) ** 2, hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="twice"):
        grad.sum().backward()


def test_all_logits_are_never_in_memory():
    hidden, head, targets = setting(rows=(4000,), width=8, vocab=3000)
    sizes = []

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            sizes.extend(each.numel() for each in (out if isinstance(out, tuple) else (out,)) if torch.is_tensor(each))
            return out

    with Sizes():
        OURS(hidden, head, targets).backward()
    assert 0 < max(sizes) <= 256 * 3000


def test_few_logits_are_left_to_torch(monkeypatch):
    monkeypatch.setattr(cross_entropy, "FEW", 111 * 50)
    args = setting()
    assert worst(differentiated(OURS, *args), differentiated(TORCHS, *args)) == 0.0
    monkeypatch.setattr(cross_entropy, "FEW", 111 * 50 - 1)
    assert type(OURS(*args).grad_fn).__name__ == "_LinearCrossEntropyBackward"
