"""Paraphrase fusion: several paraphrases of a question, none of which sees another, and one answer that looks at all.

from labkit import fusion
result = fusion.generate(lm, [["Where is Paris?", "Paris is in which country?"]], method="fuse")
result.texts, result.engine
"""

from labkit.fusion.generation import ENGINES, FusionResult, generate
from labkit.fusion.methods import METHODS, Method

__all__ = ["ENGINES", "METHODS", "FusionResult", "Method", "generate"]
