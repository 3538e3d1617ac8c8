"""An independent oracle in plain torch, without labkit: which token attends to which, measured by changing inputs."""

import torch

CASES = [
    (name, attn)
    for name in ("tiny-gpt2", "tiny-llama", "tiny-gemma", "tiny-gemma2", "tiny-gemma3")
    for attn in ("eager", "sdpa")
    if (name, attn) != ("tiny-gemma2", "sdpa")  # sdpa has no softcap
]
N, W = 20, 8  # tokens; window of the local layer (layer 0) of the tiny Gemmas
IDS = torch.arange(40, 40 + N)[None]


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

    The model runs once, on every row as it is and with each of its positions disturbed, up and down. Each attention
    gets these rows as its input, whatever the layer before it computed. `inputs` are of shape (batch, n).
    """
    inputs |= {} if real is None else {"attention_mask": real.long()}
    batch, times = max([1, *map(len, inputs.values())]), 1 + 2 * n
    inputs = {name: values.expand(batch, n).repeat(times, 1) for name, values in inputs.items()}
    outputs = []

    def before(module, args, kwargs):
        hidden = args[0] if args else kwargs["hidden_states"]
        generator = torch.Generator().manual_seed(5)
        rows = torch.randn((batch, *hidden.shape[1:]), generator=generator, dtype=hidden.dtype)
        noise = 30 * torch.randn(hidden.shape[-1], generator=generator, dtype=hidden.dtype)
        copies = rows.repeat(times, 1, 1).unflatten(0, (times, batch))
        for j in range(n):
            copies[1 + 2 * j, :, j], copies[2 + 2 * j, :, j] = noise, -noise
        hidden = copies.flatten(0, 1)
        return ((hidden, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": hidden})

    def after(module, args, output):
        base, *disturbed = output[0].unflatten(0, (times, batch))
        moved = (torch.stack(disturbed).unflatten(0, (n, 2)) - base).abs().amax(-1)  # (j, sign, batch, i)
        outputs.append((moved > 1e-6 * base.abs().max()).any(1).permute(1, 2, 0))  # (batch, i, j)

    handles = []
    for layer in layers_of(model):
        attention = layer.attn if hasattr(layer, "attn") else layer.self_attn
        handles.append(attention.register_forward_pre_hook(before, with_kwargs=True))
        handles.append(attention.register_forward_hook(after))
    try:
        with torch.no_grad():
            model(input_ids=torch.arange(40, 40 + n).expand(times * batch, n), use_cache=False, **inputs)
    finally:
        for handle in handles:
            handle.remove()
    return torch.stack(outputs)


def assert_layers_attend(model, rules, n=20):
    """Every layer attends by its rule within each text, whether the texts are padded, packed into one row, or both.

    rules: one function per layer, from the length of a text to its cells, bool (length, length).
    """
    for title, texts, inputs in batches(n):
        expected = torch.stack([torch.stack([_cells(rule, row) for row in texts]) for rule in rules])
        wrong = (layer_cells(model, n, **inputs) != expected) & (texts >= 0)[:, :, None]  # (layer, row, query, key)
        assert not wrong.any(), f"{title}: layer, row, query, key {wrong.nonzero()[0].tolist()}"


def batches(n):
    """(title, texts, inputs): the number of each token's text (batch, n), -1 = padding, and what a call says of it."""
    alone, padded, packed = torch.zeros(1, n).long(), torch.zeros(3, n).long(), torch.zeros(2, n).long()
    padded[1, -4:], padded[2, :3] = -1, -1
    packed[0, n // 2 - 1 :] = 1
    packed[1, 4:], packed[1, n - 7 :] = 1, 2
    both = packed[[0, 0, 1]]
    both[1, :3], both[2, -2:] = -1, -1
    positions = {"packed": positions_of(packed), "both": positions_of(both)}
    return [
        ("one text", alone, {}),
        ("padded", padded, {"attention_mask": (padded >= 0).long()}),
        ("packed", packed, {"position_ids": positions["packed"]}),
        ("packed and padded", both, {"position_ids": positions["both"], "attention_mask": (both >= 0).long()}),
    ]


def positions_of(texts):
    """The position of each token in its text; 1 at padding, as in transformers."""
    return torch.tensor([[1 if t < 0 else row[:i].count(t) for i, t in enumerate(row)] for row in texts.tolist()])


def _cells(rule, texts):
    cells = torch.zeros(len(texts), len(texts), dtype=torch.bool)
    for text in range(int(texts.max()) + 1):
        tokens = (texts == text).nonzero()[:, 0]
        cells[tokens[:, None], tokens] = rule(len(tokens))
    return cells


def window(left, right):
    """A query attends to `left` tokens back and `right` ahead, None = all: the rule of a layer, in plain loops."""
    return lambda n: torch.tensor(
        [[(left is None or q - k <= left) and (right is None or k - q <= right) for k in range(n)] for q in range(n)]
    )


def rule_of(mask):
    """The mask's cells by text length, a row without a key attending to itself: plain Python."""

    def cells(n):
        rows = mask.dense(n).tolist()
        return torch.tensor([[rows[q][k] or (q == k and not any(rows[q])) for k in range(n)] for q in range(n)])

    return cells


def causal_rules(model):
    """The rule of each layer of an unconverted tiny model: causal, and the first layer of a Gemma 2 or 3 is local."""
    local = model.config.model_type in ("gemma2", "gemma3_text", "gemma3")
    return [window(W - 1 if local else None, 0), window(None, 0)]


def logits(model, ids=IDS, **kwargs):
    with torch.no_grad():
        return model(ids, **kwargs).logits


def assert_without_hooks(model):
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules()), "a hook was left behind"
