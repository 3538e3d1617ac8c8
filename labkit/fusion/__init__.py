"""Paraphrase fusion: one answer from several paraphrases of a question that do not attend to each other.

from labkit import fusion
result = fusion.generate(lm, [["Where is Paris?", "Paris is in which country?"]], method="fuse")
result.texts, result.engine
"""

from labkit.fusion.generation import ENGINES, FusionResult, generate
from labkit.fusion.methods import METHODS, Method

__all__ = ["ENGINES", "METHODS", "FusionResult", "Method", "generate"]
