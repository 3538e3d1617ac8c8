"""The options of each task, declared once: fields of the task classes, and options of `labkit train TASK`.

This module imports neither torch nor transformers, so that `labkit --help` is fast.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


def setting(default: Any, help: str, **limits: Any) -> Any:
    """A field with its default, and the help and limits that `labkit train` shows."""
    return field(default=default, metadata={"text": help, **limits})


STRIDE = setting(128, "Tokens from the start of one window of a long text to the start of the next.", min=1)


@dataclass(frozen=True)
class QaOptions:
    max_length: int = setting(384, "Tokens per row.", min=8)
    doc_stride: int = STRIDE
    order: str = setting("question-first", "Position of the question: question-first or question-last.")
    prompt: str = setting("plain", "Prompt format: plain, or evidence ([INST] [POST] [CRITERION]).")
    max_answer_tokens: int = setting(30, "Maximum number of tokens of an answer.", min=1)
    null_threshold: float | None = setting(None, "Threshold for no answer. Default: chosen on the dev set.")


@dataclass(frozen=True)
class NerOptions:
    max_length: int = setting(256, "Tokens per row.", min=8)
    doc_stride: int = STRIDE
    label_on: str = setting("last", "Token of a word that carries its label: last or first.")


@dataclass(frozen=True)
class ClassifyOptions:
    max_length: int = setting(256, "Tokens per row.", min=8)
    pooling: str = setting("last", "Pooling: first, last, mean, weighted_mean, attention_query or attention_kv.")


@dataclass(frozen=True)
class EmbedOptions:
    max_length: int = setting(256, "Tokens per row.", min=8)
    pooling: str = setting("mean", "Pooling: first, last, mean, weighted_mean, attention_query or attention_kv.")


OPTIONS = {"qa": QaOptions, "ner": NerOptions, "classify": ClassifyOptions, "embed": EmbedOptions}
