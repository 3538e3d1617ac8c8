"""Verifications that verify nothing: checks that people run after a conversion, and that a causal model passes.

What a check has to do instead: change a token, look at the *earlier* outputs, and repeat it with a padded batch
(`labkit.audit`).
"""

import copy

import torch
from torch import Tensor, nn

from labkit.decoder.anatomy import find_decoder
from labkit.pitfalls.exhibit import Verification

LENGTH = 8


def _sentence(model: nn.Module) -> Tensor:
    """One unpadded row of ordinary token ids, (1, LENGTH)."""
    vocabulary = find_decoder(model).config.vocab_size
    return torch.arange(3, 3 + LENGTH, device=model.device)[None] % vocabulary


def _states(model: nn.Module, input_ids: Tensor) -> Tensor:
    """Final hidden states (batch, seq, dim) of the bare stack."""
    return find_decoder(model).stack(input_ids=input_ids, use_cache=False).last_hidden_state


@torch.no_grad()
def outputs_are_finite(model: nn.Module) -> bool:
    """The forward pass runs, and its outputs are finite and not all zero."""
    states = _states(model, _sentence(model))
    return bool(torch.isfinite(states).all() and (states != 0).any())


def flag_is_set(model: nn.Module) -> bool:
    """Every attention layer has `is_causal == False`."""
    return all(attn.is_causal is False for attn in find_decoder(model).attentions)


def layers_are_wrapped(model: nn.Module) -> bool:
    """Every attention layer runs a forward other than its class's own."""
    return all("forward" in vars(attn) for attn in find_decoder(model).attentions)


@torch.no_grad()
def _influences(model: nn.Module, changed: int, output: int) -> bool:
    """Whether another token at position `changed` of one unpadded sentence changes the state at position `output`."""
    before = _sentence(model)
    after = before.clone()
    after[:, changed] += 1
    return not torch.allclose(_states(model, before)[:, output], _states(model, after)[:, output])


def loss_goes_down(model: nn.Module, steps: int = 5, learning_rate: float = 1e-3) -> bool:
    """Whether a few steps of next-token training on one sentence lower the loss. Trains a copy of the model."""
    student, input_ids = copy.deepcopy(model).train(), _sentence(model)
    embedding = student.get_input_embeddings()
    trained = [p for p in find_decoder(student).stack.parameters() if p is not embedding.weight]
    optimizer = torch.optim.Adam(trained, lr=learning_rate)
    losses = []
    for _ in range(steps + 1):
        logits = _states(student, input_ids) @ embedding(input_ids)[0].detach().T  # (1, seq, seq): which is the next?
        loss = nn.functional.cross_entropy(logits[0, :-1].float(), torch.arange(1, LENGTH, device=logits.device))
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses[-1] < losses[0]


VERIFICATIONS = (
    Verification(
        name="outputs-are-finite",
        title="The outputs are finite and non-zero",
        code="assert torch.isfinite(out).all() and out.abs().sum() > 0",
        story="""This is true of almost every model that runs, causal models and models with broken attention
            included. The check fails for rows of -inf in the mask, and for nothing else of interest.""",
        verify=outputs_are_finite,
        fooled_by="use-cache-off",
    ),
    Verification(
        name="flag-is-set",
        title="The flag is set in every layer",
        code="assert all(layer.self_attn.is_causal is False for layer in model.model.layers)",
        story="""This reads what was written a moment ago. It shows that Python can assign attributes. Whether the
            attribute is used depends on backend and padding; under eager attention it is not.""",
        verify=flag_is_set,
        fooled_by="layer-flag-off",
        backend="eager",
    ),
    Verification(
        name="layers-are-wrapped",
        title="Every layer is wrapped",
        code='assert all("forward" in vars(layer.self_attn) for layer in model.model.layers)',
        story="""Every layer has a wrapper, and it is called. The check does not show what the wrapper does: one that
            drops the mask leaves SDPA with the flag, and the flag is causal.""",
        verify=layers_are_wrapped,
        fooled_by="none-mask-in-attention",
    ),
    Verification(
        name="first-token-reaches-the-last",
        title="A change at the start is felt at the end",
        code="assert not torch.allclose(states(text)[:, -1], states(changed_first_word)[:, -1])",
        story="""This is a real perturbation test in the wrong direction: in a causal model the last token attends to
            the first. The question is whether the first token attends to the last.""",
        verify=lambda model: _influences(model, changed=0, output=-1),
        fooled_by="is-decoder-off",
    ),
    Verification(
        name="loss-goes-down",
        title="The loss goes down",
        code="assert losses[-1] < losses[0]",
        story="""Training lowers the loss of any differentiable model, causal ones included, and on a few sentences it
            lowers it to zero. The loss measures the objective, not the mask; a model that *leaks* has the lowest
            loss of all.""",
        verify=loss_goes_down,
        fooled_by="dead-update-causal-mask",
    ),
    Verification(
        name="one-unpadded-sentence",
        title="A perturbation test on one sentence",
        code="assert not torch.allclose(states(text)[:, 0], states(changed_last_word)[:, 0])",
        story="""This is the right test on too small a sample. One sentence has no padding and is rarely longer than a
            window, and under exactly these conditions the flag of the layers decides. Add one shorter sentence to the
            batch, and the same model is causal.""",
        verify=lambda model: _influences(model, changed=-1, output=0),
        fooled_by="layer-flag-off",
        families=("gpt2", "gemma", "gemma3_text", "llama"),
    ),
)
