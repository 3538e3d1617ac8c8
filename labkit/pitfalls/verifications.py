"""Verifications that verify nothing: checks that follow a conversion in the wild, and that a causal model passes.

Each is a function `verify(model) -> bool` that does faithfully what people do. What a check would have to do instead:
change a token, look at the *earlier* ones, and do so for a padded batch too (`labkit.audit`).
"""

import copy

import torch
from torch import Tensor, nn

from labkit.decoder.anatomy import find_decoder
from labkit.pitfalls.exhibit import Verification
from labkit.pitfalls.interventions import TEXT_FAMILIES

LENGTH = 8


def _sentence(model: nn.Module) -> Tensor:
    """One unpadded row of ordinary token ids, (1, LENGTH)."""
    vocabulary = find_decoder(model).config.vocab_size
    return torch.arange(3, 3 + LENGTH, device=model.device)[None] % vocabulary


@torch.no_grad()
def _states(model: nn.Module, input_ids: Tensor) -> Tensor:
    """Final hidden states (batch, seq, dim) of the bare stack."""
    return find_decoder(model).stack(input_ids=input_ids, use_cache=False).last_hidden_state


def outputs_are_finite(model: nn.Module) -> bool:
    """The forward pass runs, and its outputs are finite and not all zero."""
    states = _states(model, _sentence(model))
    return bool(torch.isfinite(states).all() and (states != 0).any())


def flag_is_set(model: nn.Module) -> bool:
    """Every attention layer says `is_causal == False`."""
    return all(attn.is_causal is False for attn in find_decoder(model).attentions)


def layers_are_wrapped(model: nn.Module) -> bool:
    """Every attention layer runs a forward other than its class's own."""
    return all("forward" in vars(attn) for attn in find_decoder(model).attentions)


def weights_reach_everywhere(model: nn.Module) -> bool:
    """Perturb the first token: the last output changes, so 'information flows through the whole sentence'."""
    before = _sentence(model)
    after = before.clone()
    after[:, 0] += 1
    return not torch.allclose(_states(model, before)[:, -1], _states(model, after)[:, -1])


def one_unpadded_sentence(model: nn.Module) -> bool:
    """Perturb the last token of one unpadded sentence: the first output changes."""
    before = _sentence(model)
    after = before.clone()
    after[:, -1] += 1
    return not torch.allclose(_states(model, before)[:, 0], _states(model, after)[:, 0])


def loss_goes_down(model: nn.Module, steps: int = 5, learning_rate: float = 1e-3) -> bool:
    """A few steps of next-token training on one sentence bring the loss down. On a copy of the model."""
    student = copy.deepcopy(model).train()
    input_ids = _sentence(model)
    embedding = student.get_input_embeddings()
    trained = [p for p in find_decoder(student).stack.parameters() if p is not embedding.weight]
    optimizer = torch.optim.Adam(trained, lr=learning_rate)
    losses = []
    for _ in range(steps + 1):
        states = find_decoder(student).stack(input_ids=input_ids, use_cache=False).last_hidden_state  # (1, seq, dim)
        logits = states @ embedding(input_ids)[0].detach().T  # (1, seq, seq): which of them is next?
        target = torch.arange(1, LENGTH, device=logits.device)
        loss = nn.functional.cross_entropy(logits[0, :-1].float(), target)
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
        story="""True of any model that runs. A causal model has perfectly finite, non-zero outputs; so has a model
            whose attention was wrecked. The check can fail for a mask of -inf rows, and for nothing else of
            interest.""",
        verify=outputs_are_finite,
        fooled_by="use-cache-off",
        backend="sdpa",
        families=TEXT_FAMILIES,
    ),
    Verification(
        name="flag-is-set",
        title="The flag is set in every layer",
        code="assert all(layer.self_attn.is_causal is False for layer in model.model.layers)",
        story="""This reads back what was written a moment ago. It shows that Python can assign attributes. Whether
            anyone consults the attribute depends on backend and padding; under eager attention nobody does.""",
        verify=flag_is_set,
        fooled_by="layer-flag-off",
        backend="eager",
        families=TEXT_FAMILIES,
    ),
    Verification(
        name="layers-are-wrapped",
        title="Every layer is wrapped",
        code='assert all("forward" in vars(layer.self_attn) for layer in model.model.layers)',
        story="""The wrapper is there, in every layer, and it is called. What it does is another matter: a wrapper
            that drops the mask leaves SDPA with the flag, and the flag says causal.""",
        verify=layers_are_wrapped,
        fooled_by="none-mask-in-attention",
        backend="sdpa",
        families=TEXT_FAMILIES,
    ),
    Verification(
        name="first-token-reaches-the-last",
        title="A change at the start is felt at the end",
        code="assert not torch.allclose(states(text)[:, -1], states(changed_first_word)[:, -1])",
        story="""A real perturbation test, in the wrong direction: in a causal model the last token sees the first,
            that is what causal means. The question is whether the first sees the last.""",
        verify=weights_reach_everywhere,
        fooled_by="is-decoder-off",
        backend="sdpa",
        families=TEXT_FAMILIES,
    ),
    Verification(
        name="loss-goes-down",
        title="The loss goes down",
        code="assert losses[-1] < losses[0]",
        story="""Training lowers the loss of any differentiable model, causal ones included, and on a handful of
            sentences it lowers it to nothing. The loss measures the objective, not the mask; a model that *leaks*
            has the best curve of all.""",
        verify=loss_goes_down,
        fooled_by="dead-update-causal-mask",
        backend="sdpa",
        families=TEXT_FAMILIES,
    ),
    Verification(
        name="one-unpadded-sentence",
        title="A perturbation test on one sentence",
        code="assert not torch.allclose(states(text)[:, 0], states(changed_last_word)[:, 0])",
        story="""The right test on too small a sample. One sentence is never padded and rarely longer than a window,
            and those are just the conditions under which the flag of the layers decides. Add one shorter sentence
            to the batch and the same model is causal.""",
        verify=one_unpadded_sentence,
        fooled_by="layer-flag-off",
        backend="sdpa",
        families=("gpt2", "gemma", "gemma3_text", "llama"),
    ),
)
