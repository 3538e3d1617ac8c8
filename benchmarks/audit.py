"""What it costs to measure a mask: the quick and the full audit, and the proof inside a conversion.

    python benchmarks/audit.py [--model gemma3-270m] [--threads N]
    python benchmarks/audit.py --quick              (a tiny model, seconds, nothing is written)

Seconds, after one warm-up, all kinds of run in turn within each round. to_bidirectional and to_causal include their
proof. forward_64: one forward pass of one text of 64 tokens, vocabulary head included, no gradients; forward_64_stack:
the same without the head, as the proof runs. conversion_per_forward and conversion_per_forward_stack: to_bidirectional
as a multiple of them, round by round (target: at most 1). The audits measure the converted model; their verdict and
problems stand beside the times.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # the checkout, installed or not

import torch  # noqa: E402

import labkit  # noqa: E402
from benchmarks import machine  # noqa: E402

PROBE_TOKENS = 64  # the conversion is meant to cost less than one forward pass of so many tokens
ROUNDS = 5


def measure(name: str, dtype: str, device: str) -> dict:
    """One row: every kind of run, timed for one model in one dtype."""
    model = labkit.load(name, dtype=dtype, device=device).model
    ids = torch.arange(8, 8 + PROBE_TOKENS, device=model.device)[None]
    reports = {}

    def forward(part: torch.nn.Module) -> None:
        with torch.no_grad():
            part(input_ids=ids, use_cache=False)

    def audit(kind: str) -> None:
        reports[kind] = labkit.audit(model, quick=kind == "quick")

    runs = {
        "forward_64": lambda _: forward(model),
        "forward_64_stack": lambda _: forward(model.base_model),
        "to_bidirectional": lambda _: labkit.to_bidirectional(model),
        "quick_audit": lambda _: audit("quick"),
        "full_audit": lambda _: audit("full"),
        "to_causal": lambda _: labkit.to_causal(model),
    }
    seconds = machine.in_turn(runs, ROUNDS, 1, device)
    row = {"model": name, "dtype": str(model.dtype).removeprefix("torch."), "backend": reports["quick"].backend}
    row["seconds"] = {kind: machine.spread(values, 4) for kind, values in seconds.items()}
    for kind in ("forward_64", "forward_64_stack"):
        ratios = machine.ratios(seconds["to_bidirectional"], seconds[kind])
        row[f"conversion_per_{kind.replace('_64', '')}"] = ratios
    row["found"] = {kind: {"verdict": r.verdict, "problems": sorted(r.problem_kinds())} for kind, r in reports.items()}
    return row


def main() -> None:
    parser = machine.parser(__doc__)
    parser.add_argument("--model", default="gemma3-270m")
    options = parser.parse_args()
    machine.use(options)
    rows = []
    for dtype in ["float32"] if options.quick else ["bfloat16", "float32"]:
        row = measure("tiny-gemma3" if options.quick else options.model, dtype, options.device)
        rows.append(row)
        print(f"{row['model']}, {row['dtype']}, {row['backend']}, n={ROUNDS}")
        for kind, seconds in row["seconds"].items():
            print(f"  {kind:17} {seconds['median']:8.3f} s  ({seconds['min']:.3f} to {seconds['max']:.3f})")
        ratio = row["conversion_per_forward"]
        spread = f"{ratio['median']:.2f} ({ratio['min']:.2f} to {ratio['max']:.2f})"
        print(f"  conversion / forward of {PROBE_TOKENS} tokens: {spread}")
    if not options.quick:
        print(machine.write("audit", rows, __doc__))


if __name__ == "__main__":
    main()
