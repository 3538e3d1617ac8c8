"""What an exhibit is: one well-known way of *not* converting a causal model, kept runnable.

An exhibit never states its own outcome. It says what people write and why it looks right; whether it worked on a given
model, backend and batch is for a measurement to say (`labkit.audit`), today, with the versions installed here.
"""

import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from labkit.errors import ConversionError


@dataclass(frozen=True)
class Pitfall:
    """One false, partial or fragile conversion.

    `symptom` is where a measurement shall reveal it: the kind of one of the audit's problems ("pad-leak", ...) or a
    verdict ("causal", "mixed", "other"; "bidirectional" if its fault is out of sight on a CPU). `families` holds the
    `config.model_type` values for which the exhibit has a meaning. `install` does the deed; call `apply`, which checks
    the family first.
    """

    name: str
    title: str
    code: str
    story: str
    takes_effect_when: str
    families: tuple[str, ...]
    symptom: str
    install: Callable[[Any], None]

    def apply(self, model: Any) -> Any:
        """Do to `model`, in place, what the recipe does, and return it.

        Raises `ConversionError` if the recipe has no meaning for this architecture. There is no undo: hand over a copy.
        """
        family = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
        if family not in self.families:
            raise ConversionError(
                f"pitfall {self.name!r} has no meaning for a {family!r} model; it is about: {', '.join(self.families)}"
            )
        self.install(model)
        return model

    def caught_by(self, report: Any) -> str | None:
        """The audit's own words when it catches this exhibit; None if `report` found nothing to say against the model.

        Prefers the problem named by `symptom`, then any problem, then a verdict other than "bidirectional".
        """
        expected = [problem for problem in report.problems if getattr(problem, "kind", None) == self.symptom]
        for problem in [*expected, *report.problems]:
            return str(problem)
        return None if report.verdict == "bidirectional" else f"verdict: {report.verdict}"

    def describe(self, width: int = 88) -> str:
        """The exhibit as a small page of text, for a notebook or a terminal."""
        heading = f"{self.title}  [{self.name}]"
        paragraphs = {
            "What people write": textwrap.indent(self.code, "    "),
            "Why it looks right": _wrapped(self.story, width),
            "When it works, and when it does not": _wrapped(self.takes_effect_when, width),
            "Applies to": _wrapped(", ".join(self.families), width),
        }
        body = "\n\n".join(f"{label}\n{text}" for label, text in paragraphs.items())
        return f"{heading}\n{'=' * len(heading)}\n\n{body}"

    def __str__(self) -> str:
        return self.describe()


@dataclass(frozen=True)
class Verification:
    """A check that people run after a conversion, and that a model which is still causal passes.

    `verify(model)` returns True when the check is satisfied. `fooled_by` names the exhibit that it lets through,
    `backend` the attention backend under which it does, `families` the architectures on which it can be tried.
    """

    name: str
    title: str
    code: str
    story: str
    verify: Callable[[Any], bool]
    fooled_by: str
    backend: str
    families: tuple[str, ...]

    def describe(self, width: int = 88) -> str:
        """The verification as a small page of text."""
        heading = f"{self.title}  [{self.name}]"
        code = textwrap.indent(self.code, "    ")
        return (
            f"{heading}\n{'=' * len(heading)}\n\nWhat people check\n{code}\n\nWhy it verifies nothing\n"
            f"{_wrapped(self.story, width)}"
        )

    def __str__(self) -> str:
        return self.describe()


def _wrapped(text: str, width: int) -> str:
    return textwrap.fill(
        " ".join(text.split()), width, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False
    )
