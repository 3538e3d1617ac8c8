"""The folder of a study: what was asked for, what was frozen, and where each run lies.

study.json       the study and its conditions, with the sha256 of their examples
tuning/          stage 1, one folder per condition, arm and rate; no test set is read here
frozen.json      the rate of each arm, written once, before the first test set is read
runs/            stage 3: condition/arm/size/seed, each a run folder
baselines/       condition/size: what needs no model, judged on the test set example by example
adapted/         the models of arms that are trained on texts first
failures.json    what failed, and why
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any

from labkit.bench.conditions import Condition
from labkit.errors import TrainingError
from labkit.run_folder import LOCK, WRITING, held, read_json, write_whole

NO_NUMBER = "its score on dev is no number"
GROWING = ("arms", "seeds", "sizes")  # what a study may be given more of


@contextmanager
def opened(folder: str | Path, study: Any, conditions: Sequence[Condition], *, resume: bool) -> Iterator[Path]:
    """The folder of this study, new or gone on with, for one process at a time; study.json is up to date.

    Raises:
        TrainingError: it holds another study, or is not to be gone on with, or another process is at it.
    """
    with claimed(folder, resume=resume) as (path, begun):
        wanted = plain({"study": asdict(study), "conditions": [c.facts for c in conditions]})
        unsaid = plain(asdict(type(study)(study.model)))  # what an older version did not write down yet
        write_json(path / "study.json", wanted if begun is None else _grown(begun, wanted, unsaid, path))
        yield path


@contextmanager
def claimed(folder: str | Path, *, resume: bool) -> Iterator[tuple[Path, dict[str, Any] | None]]:
    """The folder of a study, for one process at a time, and its study.json; None: nothing was begun in it.

    Raises:
        TrainingError: it holds something else, or a study that is not to be gone on with, or another process is at it.
    """
    path = Path(folder).expanduser().absolute()
    if path.is_file():
        raise TrainingError(f"{path} is a file; give --output-dir a folder")
    _begun(path, resume)  # before anything is written there
    with held(path):
        yield path, _begun(path, resume)


def _begun(path: Path, resume: bool) -> dict[str, Any] | None:
    """study.json, None where there is none yet. TrainingError if the folder is not to be written to."""
    begun = read_json(path / "study.json")
    if begun is None and path.is_dir() and any(not each.name.startswith((LOCK, WRITING)) for each in path.iterdir()):
        raise TrainingError(f"{path} is not empty and holds no study; give --output-dir a new folder")
    if begun is not None and not resume:
        raise TrainingError(f"{path} holds a study already: --resume goes on with it, or give another --output-dir")
    return begun


@contextmanager
def alone(study: Path, run: Path) -> Iterator[None]:
    """What is in the block is done by one process at a time, for this run of the study in the folder `study`.

    The processes of one study share models that are adapted before the task; and a process that outlived a study which
    was killed may still be at a run that is gone on with.
    """
    from filelock import FileLock

    locks = study / ".locks"
    locks.mkdir(exist_ok=True)
    with FileLock(locks / f"{sha256(run.as_posix().encode()).hexdigest()[:32]}.lock"):  # a path may be too long a name
        yield


def read_study(path: Path) -> dict[str, Any]:
    """study.json. Raises TrainingError where there is none."""
    found = read_json(path / "study.json")
    if found is None:
        raise TrainingError(f"{path} holds no study; labkit bench mask-effect --output-dir {path} makes one")
    return found


def read_report(file: str | Path) -> dict[str, Any]:
    """The JSON that `labkit bench report` wrote. Raises TrainingError if it is not that."""
    path = Path(file).expanduser().absolute()
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TrainingError(f"{path} could not be read as a report ({error})") from error
    parts = ("conditions", "curves", "unfinished")
    if not (isinstance(found, dict) and all(isinstance(found.get(part), list) for part in parts)):
        raise TrainingError(f"{path} is no report of labkit bench report: it has no {', '.join(parts)}")
    needed = (
        "name",
        "model",
        "method",
        "task",
        "metric",
        "budget",
        "n_train",
        "n_dev",
        "n_test",
        "arms",
        "baselines",
        "pairs",
    )
    for each in found["conditions"]:
        if not isinstance(each, dict) or (missing := [key for key in needed if key not in each]):
            what = f"without {', '.join(missing)}" if isinstance(each, dict) else "that is none"
            raise TrainingError(f"{path} is no report of labkit bench report: it holds a condition {what}")
    return found


def frozen(path: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """{condition: {arm: {learning_rate, dev: {rate: score}}}} as it was frozen; {} before."""
    return read_json(path / "frozen.json") or {}


def freeze(
    path: Path, study: Any, conditions: Sequence[Condition], diverged: dict[str, str]
) -> dict[str, dict[str, dict[str, Any]]]:
    """Choose, by dev, the rate of every arm that has none yet, and write it down. Nothing frozen is changed.

    Rates at which training diverged are written down with it, and why (`diverged`: {folder of the run: reason}), as
    that arm had a smaller grid than the others. An arm of which a rate failed for another reason, such as the memory
    of that hour, is not frozen: it is to have the whole grid.
    """
    found = frozen(path)
    for condition in conditions:
        chosen = found.setdefault(condition.name, {})
        for arm in study.arms:
            if arm in chosen:
                continue
            if len(study.learning_rates) == 1:
                chosen[arm] = {"learning_rate": study.learning_rates[0], "dev": {}}
                continue
            runs = {rate: tuning_folder(condition.name, arm, rate) for rate in study.learning_rates}
            scores = {rate: score for rate, run in runs.items() if (score := _dev_score(path / run)) is not None}
            lost = {rate: run for rate, run in runs.items() if rate not in scores}
            if scores and all(str(run) in diverged or (path / run / "metrics.json").exists() for run in lost.values()):
                best = max(scores, key=scores.__getitem__)
                chosen[arm] = {"learning_rate": best, "dev": {repr(rate): score for rate, score in scores.items()}}
                if lost:
                    reasons = {repr(rate): diverged.get(str(run), NO_NUMBER) for rate, run in lost.items()}
                    chosen[arm]["failed"] = reasons
    write_json(path / "frozen.json", found)
    return found


def write_failures(path: Path, failures: dict[str, str]) -> None:
    """failures.json of the runs that failed in the last pass; it goes when there are none."""
    if failures:
        write_json(path / "failures.json", failures)
    else:
        (path / "failures.json").unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Whole or not at all. TrainingError if it cannot be written, on a full disk for one."""
    try:
        write_whole(path, json.dumps(value, indent=1) + "\n")
    except OSError as error:
        raise TrainingError(f"{path} could not be written: {error.strerror or error}; mend that, then again") from error


def sizes(wanted: Sequence[int | None], n_train: int) -> list[int | None]:
    """Those of the sizes that a training set of `n_train` examples has; None is the whole."""
    return [size for size in wanted if size is None or size < n_train]


def tuning_folder(condition: str, arm: str, rate: float) -> Path:
    """Where the run that tries a rate lies, within the folder of its study."""
    return Path("tuning") / slug(condition) / slug(arm) / f"rate-{rate!r}"


def adapted_folder(study: Path, task: str, condition: str, arm: str, seed: int) -> Path:
    """Where an arm's training on texts lies. Wherever the question stands, the texts are the same."""
    return study / "adapted" / f"{task}--{slug(condition.split('/')[0])}" / slug(arm) / f"seed-{seed}"


def run_folder(study: Path, condition: str, arm: str, size: int | None, seed: int) -> Path:
    """Where the run of an arm that is reported lies, in the folder of its study."""
    return study / "runs" / slug(condition) / slug(arm) / f"size-{size or 'all'}" / f"seed-{seed}"


def baselines_file(study: Path, condition: str, size: int | None) -> Path:
    """Where {baseline: its judged lines} lies, made of as many training examples."""
    return study / "baselines" / slug(condition) / f"size-{size or 'all'}.json"


def slug(name: str) -> str:
    """A name as one folder: mntp-200 of mntp:200, xquad--question-last of xquad/question-last."""
    return re.sub(r"[^\w.=-]", "-", name.replace("/", "--"))


def _dev_score(run: Path) -> float | None:
    """What a tuning run scored on dev; None if it has not ended, or its score is no number."""
    metrics = read_json(run / "metrics.json")
    if metrics is None or (score := metrics["dev"][metrics["metric"]]) != score:
        return None
    return score


def plain(value: Any) -> Any:
    """As it reads back from JSON."""
    return json.loads(json.dumps(value))


def _grown(begun: dict[str, Any], wanted: dict[str, Any], unsaid: dict[str, Any], path: Path) -> dict[str, Any]:
    """The study that was begun with what was added to it. TrainingError where something else has changed."""
    was, now = unsaid | begun["study"], wanted["study"]
    was["plan"] = unsaid["plan"] | was["plan"]
    if changed := [name for name in now if name not in GROWING and was.get(name) != now[name]]:
        told = "; ".join(f"{name} was {was.get(name)!r}, now {now[name]!r}" for name in changed)
        raise TrainingError(f"the study in {path} was begun otherwise: {told}")
    known = {each["name"]: each for each in begun["conditions"]}
    for each in wanted["conditions"]:
        if known.setdefault(each["name"], each) != each:
            raise TrainingError(f"the examples of {each['name']} are not those that the study in {path} was begun with")
    more = {name: [*was[name], *(each for each in now[name] if each not in was[name])] for name in GROWING}
    return {"study": was | more, "conditions": list(known.values())}
