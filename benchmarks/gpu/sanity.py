"""Convert and audit a tiny model of each family with each attention backend on this device, and pack two texts.

    python benchmarks/gpu/sanity.py --device cuda --output runs/sanity.json

verdict, problems: of labkit.audit after to_bidirectional. packed_gap: largest difference of the logits of two texts
packed into one row from those of the same texts one by one. error: why the pair was not measured. The file is written
after each row, so a run that is stopped keeps what it has.
"""

from __future__ import annotations

import argparse
import sys
from itertools import product
from pathlib import Path
from textwrap import shorten
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # the checkout, installed or not

import torch  # noqa: E402

from benchmarks import machine  # noqa: E402
from labkit import convert, models  # noqa: E402
from labkit.auditing.measure import audit  # noqa: E402
from labkit.decoder.packing import packed  # noqa: E402
from labkit.errors import LabkitError  # noqa: E402

FAMILIES = ("tiny-gpt2", "tiny-gemma3", "tiny-gemma2", "tiny-gemma", "tiny-llama")
BACKENDS = ("eager", "sdpa", "flex_attention", "flash_attention_2")


def measure(name: str, attn: str, device: str) -> dict[str, Any]:
    dtype = "bfloat16" if attn == "flash_attention_2" else "float32"  # flash has no float32
    try:
        lm = models.load(name, attn=attn, dtype=dtype, device=device)
        convert.to_bidirectional(lm.model)
        report = audit(lm.model)
        return {"verdict": report.verdict, "problems": list(report.problems), "packed_gap": packed_gap(lm, device)}
    except (LabkitError, ImportError, RuntimeError, ValueError) as error:  # a backend's own reasons
        return {"error": shorten(f"{type(error).__name__}: {error}", 300)}


@torch.no_grad()
def packed_gap(lm: Any, device: str) -> float:
    lengths = (7, 12)
    ids = torch.randint(8, lm.model.config.get_text_config().vocab_size, (2, max(lengths)), device=device)
    mask = torch.tensor([[place < length for place in range(max(lengths))] for length in lengths], device=device).long()
    with packed(lm.model):
        together = lm.model(input_ids=ids, attention_mask=mask).logits
    alone = [lm.model(input_ids=row[None, :length]).logits[0] for row, length in zip(ids, lengths, strict=True)]
    return max(
        float((row[:length] - one).abs().max()) for row, length, one in zip(together, lengths, alone, strict=True)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    torch.manual_seed(0)
    rows = []
    for attn, name in product(BACKENDS, FAMILIES):
        rows.append({"model": name, "attn": attn} | measure(name, attn, options.device))
        print(rows[-1], flush=True)
        machine.write("gpu_sanity", rows, __doc__, key="rows", target=options.output)


if __name__ == "__main__":
    main()
