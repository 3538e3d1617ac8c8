"""Proof that a converted Gemma attends in both directions in every layer: a pytest file, and a script.

    python tests/test_bidirectional_attention.py [--model gemma3-270m] [--break-layer N]

The script converts the model with labkit, prints one line per layer, and exits with 1 if a check fails. The checks use
plain torch. The attention of each layer gets the arguments that the model passed to it, but with another vector at
position j: the positions whose output changes attend to j. They must be all tokens, or in a local layer all tokens
within its window. The last check changes token j and compares the last hidden states. Each check runs without padding,
with padding on the right and with padding on the left. --break-layer leaves one layer causal, to show that the checks
can fail.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

import pytest
import torch

if __name__ == "__main__":  # the script also runs from a source tree that is not installed
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import labkit
from tests.perturbation import layer_cells

TOKENS, PADS = 12, 4  # longer than the window of tiny-gemma3, so that its local layers differ from its global ones
PADDINGS = {"no padding": (0, 0), "padded right": (0, PADS), "padded left": (PADS, 0)}  # pads before and after


def reaches(model: torch.nn.Module, real: torch.Tensor) -> torch.Tensor:
    """(seq, seq) bool: does a change of token j change the last hidden state at i?"""
    seq = real.shape[1]
    ids = torch.arange(40, 40 + seq).repeat(1 + seq, 1)
    ids[1 + torch.arange(seq), torch.arange(seq)] += 100
    with torch.no_grad():
        states = model.get_decoder()(ids, attention_mask=real.expand(1 + seq, -1), use_cache=False).last_hidden_state
    moved = (states[1:] - states[0]).abs().amax(-1)  # (j, i)
    return (moved > 1e-5 * states[0].abs().max()).T


def check(name: str, break_layer: int | None = None) -> list[tuple[str, list[str]]]:
    """Convert the named Gemma, all layers or all but one: (layer, per padding "ok" or a wrong pair of positions)."""
    model = labkit.load(name, device="cpu", dtype="float32").model
    config = model.config.get_text_config()
    count, window = config.num_hidden_layers, getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * count  # Gemma 1 has no local layers
    reach = [window if kind == "sliding_attention" else math.inf for kind in kinds] + [math.inf]
    if break_layer is not None and break_layer not in range(count):
        raise SystemExit(f"{name} has the layers 0 to {count - 1}; layer {break_layer} does not exist")
    labkit.to_bidirectional(model, layers=None if break_layer is None else sorted({*range(count)} - {break_layer}))
    rows = [(f"{number} {kind}", []) for number, kind in enumerate(kinds)] + [("whole model", [])]
    for before, after in PADDINGS.values():
        real = torch.tensor([[0] * before + [1] * TOKENS + [0] * after])
        tokens, place = real[0].bool(), torch.arange(real.shape[1])
        measured = [*layer_cells(model, real.shape[1], real)[:, 0], reaches(model, real)]
        for (_, verdicts), cells, limit in zip(rows, measured, reach, strict=True):
            expected = ((place[:, None] - place).abs() < limit) & tokens  # a padding position changes no token
            wrong = ((cells != expected) & tokens[:, None]).nonzero().tolist()
            i, j = wrong[0] if wrong else (0, 0)
            verdicts.append(f"{i} {'depends' if cells[i, j] else 'does not depend'} on {j}" if wrong else "ok")
    return rows


@pytest.mark.parametrize("name", ["tiny-gemma", "tiny-gemma2", "tiny-gemma3"])
def test_every_layer_is_bidirectional(name):
    assert {verdict for _, verdicts in check(name) for verdict in verdicts} == {"ok"}


@pytest.mark.parametrize("layer", [0, 1])
def test_a_causal_layer_is_found(layer, capsys):
    assert main(["--model", "tiny-gemma3", "--break-layer", str(layer)]) == 1
    assert f"FAILED: {layer} " in capsys.readouterr().out


@pytest.mark.gemma
def test_gemma_3_270m_is_bidirectional_in_every_layer(gemma):  # the fixture skips this test without the weights
    assert main([]) == 0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gemma3-270m", help="a Gemma: a registered name, a hub id or a folder")
    parser.add_argument("--break-layer", type=int, help="leave this layer causal")
    options = parser.parse_args(arguments)
    rows = check(options.model, options.break_layer)
    print(f"{options.model}: {TOKENS} tokens, {PADS} padding positions\n")
    for name, columns in [("layer", PADDINGS), *rows]:
        print(f"{name:22}" + "".join(f"{column:26}" for column in columns).rstrip())
    failed = [name for name, verdicts in rows if set(verdicts) != {"ok"}]
    print("\n" + (f"FAILED: {', '.join(failed)}" if failed else "Every layer attends in both directions."))
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
