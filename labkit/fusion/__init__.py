"""Paraphrase fusion: one answer from several paraphrases of a question that do not attend to each other.

from labkit import fusion
result = fusion.generate(lm, [["Where is Paris?", "Paris is in which country?"]], method="fuse")
result.texts, result.engine
"""

from typing import Any

from labkit.fusion.methods import ENGINES, METHODS, Method

__all__ = ["ENGINES", "METHODS", "FusionResult", "Method", "generate"]


def __getattr__(name: str) -> Any:
    """Load torch on the first use of `generate`: `labkit --help` reads the methods and settings without it."""
    if name in ("FusionResult", "generate"):
        from labkit.fusion import generation

        return getattr(generation, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
