"""`labkit audit`, `labkit convert` and `labkit leakage`. Registered in labkit/cli/root.py."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from labkit.cli.console import Attn, Dtype, Json, Name, report, waiting
from labkit.errors import LabkitError, ModelError, require_one_of

LEAKAGE_VOCABULARY = 64  # with few tokens a short training shows what chance can achieve


def audit(
    name: Name,
    attn: Attn = None,
    dtype: Dtype = None,
    expect: Annotated[
        str | None, typer.Option(help="causal or bidirectional: exit with 1 if the model is not, or has problems.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Measure fewer kinds of input, which is faster.")] = False,
    reference: Annotated[str | None, typer.Option(help="Original model: check that only the mask differs.")] = None,
    as_json: Json = False,
) -> None:
    """Measure which mask each layer uses.

    The mask is measured from the behaviour of the model, not read from its configuration. Of an encoder, the body is
    measured.

    Example: labkit audit ./my-encoder --expect bidirectional
    """
    if expect is not None:
        require_one_of("--expect", expect, ("causal", "bidirectional"), LabkitError)
    model = _any_model(name, attn, dtype)
    original = _any_model(reference, attn, dtype) if reference else None
    from labkit.auditing import measure

    with waiting(f"measuring {name}"):
        measured = measure.audit(model, reference=original, quick=quick)
    print(measured.to_json() if as_json else str(measured))
    if expect and (why := measured.failure(expect)):
        print(f"labkit: {name} was expected to be {expect} and {why}", file=sys.stderr)
        raise typer.Exit(1)


def _any_model(name: str, attn: str | None, dtype: str | None) -> Any:
    """A language model, or the body of an encoder, which is reported."""
    from labkit.models import load

    try:
        return load(name, attn=attn, dtype=dtype).model
    except ModelError as error:
        if error.kind != "encoder":
            raise
    body = load(name, attn=attn, dtype=dtype, task="base").model
    print(f"labkit: {name} is an encoder: its body, {type(body).__name__}, is measured", file=sys.stderr)
    return body


def convert(
    name: Name,
    output_dir: Annotated[str, typer.Option(help="A new or empty folder.")],
    window: Annotated[str, typer.Option(help="Window of the local layers: keep, halve or global.")] = "keep",
    layers: Annotated[str, typer.Option(help="Layers to unmask: all, middle-third, or numbers such as 0,1,2.")] = "all",
    attn: Attn = None,
    dtype: Dtype = None,
    as_json: Json = False,
) -> None:
    """Make a model bidirectional and save it.

    The folder contains a model card. Plain transformers loads it, except where it cannot express the masks: after a
    choice of --layers, and for a few families. The command reports this; labkit.load then loads the folder.

    Example: labkit convert gemma3-270m --output-dir gemma-encoder --window keep
    """
    from labkit.convert import choose_layers, to_bidirectional
    from labkit.files import require_writable, write_folder
    from labkit.models import cards, load
    from labkit.tasks.in_force import require_window

    folder = Path(output_dir).expanduser().absolute()
    require_writable(folder)
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise LabkitError(f"{folder} exists and is not empty; give --output-dir a new or an empty folder")
    lm = load(name, attn=attn, dtype=dtype)
    require_window(lm.model, window)
    chosen = choose_layers(layers, lm.model.config.get_text_config().num_hidden_layers)
    to_bidirectional(lm.model, window=window, layers=chosen)
    files = cards.of_converted(lm, chosen)
    write_folder(folder, lambda new: cards.save(new, lm.model, lm.tokenizer, files))
    plain = cards.loads_in_transformers(lm.model, chosen)
    done = {"folder": folder, "name": name, "window": window, "layers": chosen or "all", "plain_transformers": plain}
    lines = [f"{folder}: {name}, bidirectional in {'all layers' if chosen is None else f'layers {chosen}'}"]
    if not plain:
        lines.append("plain transformers cannot express its masks; load the folder with labkit.load")
    report(as_json, done | {"licence": lm.licence}, *lines)


def leakage(
    name: Name,
    train: Annotated[
        bool, typer.Option("--train", help="Also train the model and an unmasked copy on random tokens.")
    ] = False,
    tokens: Annotated[int, typer.Option(help="Length of the text in which each token is changed in turn.", min=2)] = 16,
    steps: Annotated[int, typer.Option(help="Training steps of --train.", min=1)] = 300,
    attn: Attn = None,
    dtype: Dtype = None,
    as_json: Json = False,
) -> None:
    """Test a causal model for leaks.

    Reports which positions depend on a later token, by how much, and in which layer. Exit code 1 if there is a leak.

    Example: labkit leakage gpt2-mini --train
    """
    from labkit.auditing.leaks import find_leaks
    from labkit.models import load

    model = load(name, attn=attn, dtype=dtype).model
    with waiting(f"looking for leaks in {name}"):
        reports = {"perturbation": find_leaks(model, tokens=tokens)}
    if train:
        from labkit.leak_meter import leak_meter

        reports["training"] = leak_meter(model, LEAKAGE_VOCABULARY, steps=steps)
    values = {"training": None} | {kind: json.loads(leaks.to_json()) for kind, leaks in reports.items()}
    report(as_json, values, *map(str, reports.values()))
    raise typer.Exit(0 if all(leaks.clean for leaks in reports.values()) else 1)
