"""How the results of a benchmark are written: no number without machine and spread."""

from __future__ import annotations

import json
import os
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from labkit.bench.machine import describe, spread

__all__ = ["RESULTS", "describe", "spread", "write"]

RESULTS = Path(__file__).parent / "results"


def write(name: str, results: Any, notes: str) -> Path:
    """Write `results`, machine, date and `notes` (what was measured, in which unit) to results/<name>.json, whole."""
    RESULTS.mkdir(exist_ok=True)
    date = datetime.now(UTC).date().isoformat()
    content = {"benchmark": name, "date": date, "notes": notes, "machine": describe(), "results": results}
    handle, temporary = tempfile.mkstemp(dir=RESULTS, suffix=".json")
    with os.fdopen(handle, "w", encoding="utf-8") as out:
        json.dump(content, out, indent=1)
        out.write("\n")
    Path(temporary).chmod(0o644)
    target = RESULTS / f"{name}.json"
    os.replace(temporary, target)
    return target
