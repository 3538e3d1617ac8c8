"""An oracle of its own: who sees whom, by changing inputs, in plain torch. Imports nothing of labkit."""

import torch


def stack_of(model):
    """The module that runs the decoder layers."""
    for name in ("transformer", "model", "language_model", "base_model"):
        inner = getattr(model, name, None)
        if inner is not None and inner is not model:
            return stack_of(inner)
    return model


def layers_of(model):
    stack = stack_of(model)
    return stack.h if hasattr(stack, "h") else stack.layers


def layer_cells(model, n, real=None, **inputs):
    """Bool (layers, batch, n, n): does disturbing the input of layer l at j change what its *attention* puts out at i?

    The whole model runs once per layer, on every row as it is and with each of its positions disturbed, up and down;
    only that layer's attention input is disturbed.
    """
    batch, times = 1 if real is None else real.shape[0], 1 + 2 * n
    ids = torch.arange(40, 40 + n).expand(times * batch, n)
    mask = {} if real is None else {"attention_mask": real.long().repeat(times, 1)}
    found = []
    for layer in layers_of(model):
        attention = layer.attn if hasattr(layer, "attn") else layer.self_attn
        base, *rest = _attention_output(model, attention, batch, ids, mask | inputs).unflatten(0, (times, batch))
        rest = torch.stack(rest).unflatten(0, (n, 2))  # (j, sign, batch, i, dim)
        found.append(((rest - base).abs().amax(-1) > 0).any(1).permute(1, 2, 0))  # (batch, i, j)
    return torch.stack(found)


def _attention_output(model, attention, batch, ids, inputs):
    """(times * batch, n, dim): first of the rows as they are, then with position 0 disturbed up and down, and so on."""
    seen = []

    def before(module, args, kwargs):
        hidden = args[0] if args else kwargs["hidden_states"]
        generator = torch.Generator().manual_seed(5)
        rows = torch.randn((batch, *hidden.shape[1:]), generator=generator, dtype=hidden.dtype)
        noise = 30 * torch.randn(hidden.shape[-1], generator=generator, dtype=hidden.dtype)
        each = rows.repeat(len(hidden) // batch, 1, 1).unflatten(0, (-1, batch))
        for j in range(hidden.shape[1]):
            each[1 + 2 * j, :, j], each[2 + 2 * j, :, j] = noise, -noise
        hidden = each.flatten(0, 1)
        return ((hidden, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": hidden})

    def after(module, args, output):
        seen.append(output[0])

    handles = [attention.register_forward_pre_hook(before, with_kwargs=True), attention.register_forward_hook(after)]
    try:
        with torch.no_grad():
            model(input_ids=ids, use_cache=False, **inputs)
    finally:
        for handle in handles:
            handle.remove()
    return seen[0]


def window_cells(n, left, right):
    """Bool (n, n): a query sees `left` tokens back and `right` ahead, as nested Python loops; None = all."""
    return torch.tensor(
        [[(left is None or q - k <= left) and (right is None or k - q <= right) for k in range(n)] for q in range(n)]
    )
