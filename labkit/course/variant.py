"""The variant of an assignment: which sentences, sizes and seeds it asks about.

The public one is the same for all, and its draws are the first of their choices. A secret makes a private one: other
draws, which nobody can know who has not the secret. Only its key, a digest, is ever written into a file.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from labkit.errors import CourseError

KEY_LETTERS = 16
PUBLIC = "public"


@dataclass(frozen=True)
class Variant:
    """Draws by name: the same name draws the same value, whatever was drawn before."""

    key: str = PUBLIC
    round: int = 0  # graders ask in several rounds, which differ in what `rng` gives and in nothing that a master shows

    @classmethod
    def of(cls, secret: str | None) -> Variant:
        """The private variant of a secret, the public one of None. Raises CourseError for an empty secret."""
        if secret is None:
            return cls()
        if not secret.strip():
            raise CourseError("a variant's secret is empty; give any text that students cannot guess")
        return cls(hashlib.sha256(f"labkit course {secret}".encode()).hexdigest()[:KEY_LETTERS])

    @property
    def public(self) -> bool:
        return self.key == PUBLIC

    def another_round(self, number: int) -> Variant:
        return Variant(self.key, number)

    def choose(self, name: str, options: Sequence[Any]) -> Any:
        """One of the options, for what the student sees: the first in the public variant."""
        return options[0] if self.public else self._random(name, 0).choice(list(options))

    def rng(self, name: str) -> random.Random:
        """A generator for what only the check sees: sizes, values, which fault is planted."""
        return self._random(name, self.round)

    def whole(self, name: str, least: int, most: int) -> int:
        """A whole number from `least` to `most`, both included, of this round."""
        return self.rng(name).randint(least, most)

    def seed(self, name: str) -> int:
        """A seed of this round, for `torch.Generator().manual_seed`."""
        return self.rng(name).randrange(2**31)

    def _random(self, name: str, number: int) -> random.Random:
        return random.Random(f"{self.key}/{number}/{name}")
