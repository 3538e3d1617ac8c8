"""What an exhibit is: one well-known way of *not* converting a causal model, kept runnable.

An exhibit does not state its own outcome. It shows what people write and why it looks right. Whether it works on a
given model, backend and batch is measured (`labkit.audit`), with the versions that are installed.
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
    architectures for which the exhibit has a meaning. `install` changes the model; call `apply`, which checks the
    family first.
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
        """Apply the recipe to `model` in place, and return the model.

        There is no undo: pass a copy. Raises `ConversionError` if the recipe has no meaning for this architecture.
        """
        family = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
        if family not in self.families:
            raise ConversionError(
                f"pitfall {self.name!r} has no meaning for a {family!r} model; it is about: {', '.join(self.families)}"
            )
        self.install(model)
        return model

    def caught_by(self, report: Any) -> str | None:
        """The text of the audit's problem that catches this exhibit; None if `report` has nothing against the model.

        Prefers the problem named by `symptom`, then any problem, then a verdict other than "bidirectional".
        """
        if report.problems:
            return str(min(report.problems, key=lambda problem: problem.kind != self.symptom))
        return None if report.verdict == "bidirectional" else f"verdict: {report.verdict}"

    def describe(self, width: int = 88) -> str:
        """The exhibit as a page of text, for a notebook or a terminal."""
        texts = {
            "Why it looks right": self.story,
            "When it works, and when it does not": self.takes_effect_when,
            "Applies to": ", ".join(self.families),
        }
        return _page(self, "What people write", texts, width)

    __str__ = describe


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

    def describe(self, width: int = 88) -> str:
        """The verification as a page of text."""
        return _page(self, "What people check", {"Why it verifies nothing": self.story}, width)

    __str__ = describe


def _page(exhibit: Pitfall | Verification, code_label: str, texts: dict[str, str], width: int) -> str:
    heading = f"{exhibit.title}  [{exhibit.name}]"
    paragraphs = [f"{heading}\n{'=' * len(heading)}", f"{code_label}\n{textwrap.indent(exhibit.code, '    ')}"]
    for label, text in texts.items():
        lines = textwrap.wrap(" ".join(text.split()), width - 4, break_on_hyphens=False)
        paragraphs.append("\n".join([label, *(f"    {line}" for line in lines)]))
    return "\n\n".join(paragraphs)
