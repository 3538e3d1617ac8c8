"""Studies of `labkit bench mask-effect` whose runs were made up: what a report of them has to say is known."""

import json
import random
from pathlib import Path

from labkit.bench import folders


def made_up(
    folder: Path,
    chances: dict[str, float],
    seeds=5,
    n=400,
    smaller: dict[int, dict[str, float]] | None = None,
    max_steps: int | None = None,
):
    """A study whose runs are right with these chances, in points; `smaller`: the same for fewer training examples."""
    by_size = {**(smaller or {}), None: chances}
    facts = {"name": "invented/classify", "task": "classify", "n_train": 10, "n_dev": 10, "n_test": n}
    plan = {"epochs": 1, "max_steps": max_steps, "batch_size": 8, "gradient_accumulation": 1, "dtype": "float32"}
    study = {
        "model": "none", "method": "full", "learning_rates": [1e-3], "arms": list(chances), "sizes": list(by_size),
        "seeds": list(range(seeds)), "plan": plan,
    }  # fmt: skip
    folder.mkdir()
    (folder / "study.json").write_text(json.dumps({"study": study, "conditions": [facts]}))
    rates = {name: {"learning_rate": 1e-3, "dev": {}} for name in chances}
    (folder / "frozen.json").write_text(json.dumps({"invented/classify": rates}))
    for size, name, chance in [(size, *each) for size, given in by_size.items() for each in given.items()]:
        for seed in range(seeds):
            rng = random.Random(f"{size or ''} {name} {seed}".strip())
            run = folders.run_folder(folder, "invented/classify", name, size, seed)
            run.mkdir(parents=True)
            lines = [{"id": str(i), "group": "", "correct": int(rng.random() < chance / 100)} for i in range(n)]
            (run / "judged.test.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
            metrics = {
                "metric": "accuracy", "baselines": {}, "mask": {"measured": "causal"}, "seconds": 1.0,
                "data_order": str(seed), "head_start": str(seed), "n_rows": 10, "steps": max_steps or 5,
            }  # fmt: skip
            (run / "metrics.json").write_text(json.dumps(metrics))
            history = [{"step": step, "accuracy": chance / 100} for step in (3, 5)]
            (run / "trainer_state.json").write_text(json.dumps({"log_history": history}))
    return folder
