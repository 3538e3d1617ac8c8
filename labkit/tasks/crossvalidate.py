"""k-fold cross-validation: every example is scored once, by a model that saw nothing of its passage."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from labkit.datasets.splits import folds
from labkit.errors import DataError
from labkit.run_folder import RunFolder
from labkit.tasks.finetune import digest, finetune, numbers
from labkit.tasks.plans import Plan


def crossvalidate(
    task: str,
    model: str | Path,
    examples: Sequence[Any],
    output_dir: str | Path,
    *,
    k: int = 5,
    plan: Plan | None = None,
    skipped: dict[str, int] | None = None,
    resume: bool = False,
    say: Callable[[str], None] = lambda text: print(text, file=sys.stderr),
    **choices: Any,
) -> dict[str, Any]:
    """Fine-tune `k` times, each time scored on another part; the parts are even, and no passage is in two of them.

    The checkpoint of a fold is chosen on a tenth held out of its training part, never on the part that is scored.
    `skipped` and `choices` are those of `labkit.tasks.finetune.finetune`. Leaves fold-1/ to fold-k/, each a run folder,
    and metrics.json: for every score its value per fold, the mean, and the half width of the 95 % interval (Student's t
    over the folds, whose training parts overlap: it is a little too narrow, Bengio and Grandvalet 2004). Goes on after
    a kill with `resume`.

    Raises:
        DataError: fewer groups than folds; and what `finetune` raises.
    """
    plan = plan or Plan()
    if not examples:
        raise DataError("there are no examples")
    parts = folds(examples, k, plan.seed)
    config = {"command": f"train {task} --folds", "folds": k, "plan": asdict(plan), "examples": digest(examples)}
    config |= {"model": str(model), "choices": {name: str(value) for name, value in choices.items()}}
    finished = RunFolder.check(output_dir, config, resume=resume)  # it may be where nothing can be written any more
    if finished.metrics is not None:
        say(f"{finished.path} is finished: {k} folds")
        return finished.metrics
    with RunFolder.alone(output_dir, config, resume=resume) as run:
        scored = []
        for number, part in enumerate(parts, 1):
            say(f"fold {number} of {k}: {len(part):,} examples are scored, {len(examples) - len(part):,} trained on")
            rest = [each for other in parts if other is not part for each in other]
            folder = run.path / f"fold-{number}"
            found = finetune(
                task, model, rest, folder, test=part, plan=plan, resume=folder.exists(), say=say, **choices
            )
            scored.append(numbers(found["test"]))
        shared = [name for name in scored[0] if all(name in each for each in scored)]
        summary = {name: _mean([each[name] for each in scored]) for name in shared}
        metrics = {"task": task, "folds": k, "n": len(examples), "n_per_fold": [len(part) for part in parts]}
        metrics |= {} if skipped is None else {"n_skipped": skipped}
        metrics |= {"seed": plan.seed, "scores": summary}
        run.write_json("metrics.json", metrics)
        return metrics


def _mean(values: list[float]) -> dict[str, Any]:
    half = float(stats.t.ppf(0.975, len(values) - 1) * stats.sem(values))
    return {"mean": float(np.mean(values)), "half_width_95": half, "folds": values}
