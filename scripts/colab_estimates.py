"""What each notebook should need in the profile `colab` (a T4 of 15 GB): estimated, not measured. Prints a table.

    python scripts/colab_estimates.py [--write]      (--write: put it into docs/colab.md, between its two marks)

GPU memory: the memory model of `labkit train` (labkit/tasks/needs.py: one row is run on the CPU, and scaled to a batch
of rows as long as the task allows), and that of `labkit.load` (1.2 times the weights) for models that
are only read, with 0.8 GB for CUDA itself.

Minutes: 2 for everything but the long loops (in profile ci a whole notebook stays under 90 s on two CPU cores), 1 more
where Gemma is converted first, and the loops: their steps, each at least 0.05 s on a GPU and 0.01 s on the CPU (the
time to start its kernels), or 6 x parameters x tokens at 1.6 TFLOP/s on the GPU (a fifth of a T4's float32 peak) and
50 GFLOP/s on the CPU (half of what benchmarks/results/cost_cpu.json found on two cores).
"""

import math
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ["LABKIT_PROFILE"] = "colab"

from labkit.decoder.limits import GB, LOADING  # noqa: E402
from labkit.profile import by_name  # noqa: E402

SIZE = by_name("colab")
DOCS = ROOT / "docs" / "colab.md"
MARKS = "<!-- written by scripts/colab_estimates.py -->", "<!-- end -->"
RATE = {"GPU": 1.6e12, "CPU": 50e9}  # floating-point operations a second
FLOOR = {"GPU": 0.05, "CPU": 0.01}  # seconds a step
BASE_MINUTES, CONVERSION = 2, 1
SEEDS = len(SIZE.seeds)


@dataclass(frozen=True)
class Loop:
    """The longest work of a notebook: `runs` of `steps`, each of `rows` rows of `length` tokens."""

    runs: int
    steps: int
    rows: int
    length: int
    parameters: float  # of the model that is trained
    where: str = "GPU"

    @property
    def seconds(self) -> float:
        flops = 6 * self.parameters * self.rows * self.length
        return self.runs * self.steps * max(FLOOR[self.where], flops / RATE[self.where])


MINI, GEMMA = 5.9e6, 268e6  # parameters: gpt2-mini, gemma3-270m


def epochs(rows: int, batch: int, times: int) -> int:
    return times * math.ceil(rows / batch)


@dataclass(frozen=True)
class Lesson:
    work: str
    loops: tuple[Loop, ...] = ()
    read: tuple[float, int] | None = (
        None  # parameters, bytes of each: of the largest model that is only read on the GPU
    )
    trained: Callable[[], float] | None = None  # bytes of the largest training on the GPU
    converts: bool = False

    @property
    def gigabytes(self) -> float | None:
        from labkit.tasks.needs import BASE

        if self.trained is not None:
            return self.trained() / GB
        return None if self.read is None else (BASE["cuda"] + LOADING * self.read[0] * self.read[1]) / GB

    @property
    def minutes(self) -> int:
        loops = sum(loop.seconds for loop in self.loops) / 60
        return BASE_MINUTES + CONVERSION * self.converts + math.ceil(loops)


def training_bytes(rows: int, length: int) -> Callable[[], float]:
    """Bytes on a GPU of a step of gpt2-mini in float32, with a loss over its whole vocabulary (the most it can be)."""

    def needed() -> float:
        import torch

        import labkit
        from labkit.tasks.needs import BASE, measured_need

        torch.manual_seed(0)
        model = labkit.load("gpt2-mini", device="cpu", dtype="float32").model
        ids = torch.randint(1000, (1, length))
        need = measured_need(
            model, lambda m, batch: m(**batch, labels=batch["input_ids"]).loss, {"input_ids": ids}, share=rows
        )
        return need.total - need.base + BASE["cuda"]

    return needed


STEPS, BATCH, LENGTH = SIZE.max_steps, SIZE.batch_size, SIZE.max_length
LESSONS = {
    "00_start_here": Lesson("tiny models", read=(1e5, 4)),
    "01_attention_and_masks": Lesson("tensors, on the CPU"),
    "02_gpt2_causal_to_bidirectional": Lesson(
        "a small GPT and six twins of gpt2-mini, on the CPU",
        (Loop(1, min(1000, 5 * STEPS), 8, 64, 0.3e6, "CPU"), Loop(2 * SEEDS, min(200, 2 * STEPS), 8, 32, MINI, "CPU")),
    ),
    "03_false_conversions": Lesson("tiny models", read=(1e5, 4)),
    "04_next_token_leakage": Lesson(
        "five leak meters, two small GPTs for each seed in each, on the CPU",
        (Loop(5 * 2 * SEEDS, min(max(200, STEPS), 500), 16, 32, 0.15e6, "CPU"),),
    ),
    "05_new_objectives": Lesson(
        "13 trainings of gpt2-mini",
        (Loop(4 * SEEDS + 1, STEPS, BATCH, LENGTH, MINI),),
        trained=training_bytes(BATCH, LENGTH),
    ),
    "06_gemma_conversion": Lesson("Gemma 3 270M, read", read=(GEMMA, 2), converts=True),
    "07_attention_maps": Lesson("Gemma 3 270M and gpt2-mini, read", read=(GEMMA + MINI, 2), converts=True),
    "08_question_answering": Lesson(
        "five trainings, two of them exercises, of gpt2-mini",
        (Loop(5, min(600, 10 * STEPS), 8, 64, MINI),),
        trained=training_bytes(8, 384),
    ),
    "09_named_entities": Lesson(
        "eight trainings of gpt2-mini",
        (Loop(2 * SEEDS, epochs(216, 8, 12), 8, 64, MINI), Loop(2, epochs(1209, 8, 6), 8, 64, MINI)),
        trained=training_bytes(8, 256),
    ),
    "10_sentences": Lesson(
        "six trainings of gpt2-mini",
        (Loop(2 * SEEDS, epochs(216, 16, 20), 16, 64, MINI),),
        trained=training_bytes(16, 64),
    ),
    "11_paraphrase_fusion": Lesson(
        "Gemma 3 270M in float32 answers about 200 questions in four ways",
        (Loop(4 * 8, SIZE.max_examples // 10, 5, 20, GEMMA / 3),),  # 8 tokens an answer; a forward pass is a third
        read=(GEMMA, 4),
        converts=True,
    ),
    "12_future_attention": Lesson(
        "nine small GPTs", (Loop(3 * SEEDS, 120, 16, 96, 0.5e6),), trained=training_bytes(16, 96)
    ),
    "13_scaling_up": Lesson(
        "nine LoRA trainings of gpt2-mini, and gpt2-mini once",
        (Loop(3 * SEEDS, min(150, STEPS // 4), 16, 64, MINI), Loop(1, STEPS // 10, 8, 64, MINI)),
        trained=training_bytes(16, 64),
    ),
}


def table() -> str:
    lines = ["| notebook | the longest of its work | GPU memory, GB | minutes |", "|---|---|---:|---:|"]
    for name, lesson in LESSONS.items():
        room = lesson.gigabytes
        cells = (f"`{name}`", lesson.work, "none" if room is None else f"{room:.1f}", lesson.minutes)
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    if arguments not in ([], ["--write"]):
        sys.exit(__doc__.strip())
    made = table()
    print(made)
    if arguments:
        text = DOCS.read_text(encoding="utf-8")
        before, _, rest = text.partition(MARKS[0])
        DOCS.write_text(f"{before}{MARKS[0]}\n{made}\n{MARKS[1]}{rest.partition(MARKS[1])[2]}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
