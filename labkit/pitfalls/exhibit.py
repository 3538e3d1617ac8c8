"""What an exhibit is: one well-known way of *not* converting a causal model, kept runnable.

An exhibit does not state its own outcome. Whether it works on a given model, backend and batch is measured
(`labkit.audit`), with the versions that are installed.
"""

import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from labkit.errors import ConversionError

TEXT_FAMILIES = ("gpt2", "gemma", "gemma2", "gemma3_text", "llama")  # values of `config.model_type`
ROTARY_FAMILIES = ("gemma", "gemma2", "gemma3_text", "llama")
WINDOWED_FAMILIES = ("gemma2", "gemma3_text")


@dataclass(frozen=True)
class Pitfall:
    """One false, partial or fragile conversion.

    `symptom` is how a measurement reveals it: the kind of a problem of the audit ("pad-leak", ...) or a verdict
    ("causal", "mixed", "other"; "bidirectional" if no measurement on a CPU shows the fault). `families` are the
    architectures on which the exhibit has a meaning.
    """

    name: str
    title: str
    code: str
    story: str
    takes_effect_when: str
    symptom: str
    install: Callable[[Any], None]
    families: tuple[str, ...] = TEXT_FAMILIES

    def apply(self, model: Any) -> Any:
        """Apply the recipe to `model` in place, without undo, and return the model.

        Raises `ConversionError` if the recipe has no meaning for this architecture.
        """
        family = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
        if family not in self.families:
            raise ConversionError(
                f"pitfall {self.name!r} has no meaning for a {family!r} model; it is about: {', '.join(self.families)}"
            )
        self.install(model)
        return model

    def caught_by(self, report: Any) -> str | None:
        """What the audit has against this exhibit, as text, or None if it has nothing against it.

        The problem named by `symptom`, else any problem, else a verdict other than "bidirectional".
        """
        if report.problems:
            return str(min(report.problems, key=lambda problem: problem.kind != self.symptom))
        return None if report.verdict == "bidirectional" else f"verdict: {report.verdict}"

    def __str__(self) -> str:
        paragraphs = {
            "Why it looks right": self.story,
            "When it works, and when it does not": self.takes_effect_when,
            "Applies to": ", ".join(self.families),
        }
        return _page(self, "What people write", paragraphs)


@dataclass(frozen=True)
class Verification:
    """A check that people run after a conversion, and that a model which is still causal passes.

    `verify(model)` returns True if the model passes the check. `fooled_by` names an exhibit that passes it although it
    is causal, `backend` the attention backend under which it does, `families` the architectures on which to try it.
    """

    name: str
    title: str
    code: str
    story: str
    verify: Callable[[Any], bool]
    fooled_by: str
    backend: str = "sdpa"
    families: tuple[str, ...] = TEXT_FAMILIES

    def __str__(self) -> str:
        return _page(self, "What people check", {"Why it verifies nothing": self.story})


def _page(exhibit: Pitfall | Verification, code_label: str, paragraphs: dict[str, str]) -> str:
    heading = f"{exhibit.title}  [{exhibit.name}]"
    page = [f"{heading}\n{'=' * len(heading)}", f"{code_label}\n{textwrap.indent(exhibit.code, '    ')}"]
    for label, text in paragraphs.items():
        lines = textwrap.fill(" ".join(text.split()), 84, break_on_hyphens=False)
        page.append(f"{label}\n{textwrap.indent(lines, '    ')}")
    return "\n\n".join(page)
