"""What it costs to measure a mask: the quick and the full audit, and the proof inside a conversion.

python benchmarks/audit.py [--model gemma3-270m] [--dtypes bfloat16 float32] [--repeats 5] [--threads N]
python benchmarks/audit.py --quick              (a tiny model, seconds, nothing is written)
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # the checkout, installed or not

from benchmarks import machine  # noqa: E402

PROBE_TOKENS = 64  # the conversion is meant to cost less than one forward pass of so many tokens
NOTES = (
    "seconds, after one warm-up, all kinds of run in turn within each round. to_bidirectional and to_causal include "
    "their proof. forward_64: one forward pass of one text of 64 tokens, vocabulary head included, no gradients; "
    "forward_64_stack: the same without the head, as the proof runs. conversion_per_forward and "
    "conversion_per_forward_stack: to_bidirectional as a multiple of them, round by round (target: at most 1). The "
    "audits measure the converted model; their verdict and problems stand beside the times."
)


def measure(name: str, dtype: str, device: str, repeats: int) -> dict:
    """One row: every kind of run, timed for one model in one dtype."""
    import torch

    import labkit

    lm = labkit.load(name, dtype=dtype, device=device)
    model = lm.model
    ids = torch.arange(8, 8 + PROBE_TOKENS, device=model.device)[None]
    reports = {}

    @torch.no_grad()
    def forward_64():
        model(input_ids=ids, use_cache=False)

    @torch.no_grad()
    def forward_64_stack():
        model.base_model(input_ids=ids, use_cache=False)

    def quick_audit():
        reports["quick"] = labkit.audit(model, quick=True)

    def full_audit():
        reports["full"] = labkit.audit(model)

    runs = {
        "forward_64": forward_64,
        "forward_64_stack": forward_64_stack,
        "to_bidirectional": lambda: labkit.to_bidirectional(model),
        "quick_audit": quick_audit,
        "full_audit": full_audit,
        "to_causal": lambda: labkit.to_causal(model),
    }
    seconds = machine.in_turn({kind: lambda _, run=run: run() for kind, run in runs.items()}, repeats, 1, device)
    per_forward = {
        f"conversion_per_{kind.replace('_64', '')}": machine.ratios(seconds["to_bidirectional"], seconds[kind])
        for kind in ("forward_64", "forward_64_stack")
    }
    spreads = {kind: machine.spread([round(s, 4) for s in each]) for kind, each in seconds.items()}
    found = {kind: {"verdict": r.verdict, "problems": sorted(r.problem_kinds())} for kind, r in reports.items()}
    row = {"model": name, "dtype": str(model.dtype).removeprefix("torch."), "backend": reports["quick"].backend}
    return row | {"seconds": spreads, **per_forward, "found": found}


def main() -> None:
    parser = machine.parser(__doc__)
    parser.add_argument("--model", default="gemma3-270m")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--repeats", type=int, default=5, help="timed rounds (default 5)")
    options = parser.parse_args()
    if options.quick:
        options.model, options.dtypes, options.repeats = "tiny-gemma3", ["float32"], 3
    machine.use(options)
    rows = []
    for dtype in options.dtypes:
        row = measure(options.model, dtype, options.device, options.repeats)
        rows.append(row)
        print(f"{row['model']}, {row['dtype']}, {row['backend']}, n={options.repeats}")
        for kind, each in row["seconds"].items():
            print(f"  {kind:17} {each['median']:8.3f} s  ({each['min']:.3f} to {each['max']:.3f})")
        ratio = row["conversion_per_forward"]
        spread = f"{ratio['median']:.2f} ({ratio['min']:.2f} to {ratio['max']:.2f})"
        print(f"  conversion / forward of {PROBE_TOKENS} tokens: {spread}")
    if not options.quick:
        print(machine.write("audit", rows, NOTES))


if __name__ == "__main__":
    main()
