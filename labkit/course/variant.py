"""The variant of an assignment: which sentences, sizes and seeds it asks about.

The public one is the same for all, and what it shows are the first of the choices. A secret makes a private one. Its
key, a digest, stands in the students' notebooks: it settles what they are shown and what their own checks ask. What
graders ask, in several rounds, is drawn with the salt, another digest, which only who has the secret has.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from labkit.errors import CourseError

LETTERS = 16
PUBLIC = "public"


@dataclass(frozen=True)
class Variant:
    """Draws by name: the same name draws the same value, whatever was drawn before.

    Salt and round change what `rng` gives, and nothing that a master shows.
    """

    key: str = PUBLIC
    salt: str = ""
    round: int = 0

    @classmethod
    def of(cls, secret: str | None) -> Variant:
        """The private variant of a secret, the public one of None. Raises CourseError for an empty secret."""
        if secret is None:
            return cls()
        if not secret.strip():
            raise CourseError("a variant's secret is empty; give any text that students cannot guess")
        key, salt = (hashlib.sha256(f"labkit {use} {secret}".encode()).hexdigest()[:LETTERS] for use in ("key", "salt"))
        return cls(key, salt)

    @property
    def public(self) -> bool:
        return self.key == PUBLIC

    def another_round(self, number: int) -> Variant:
        return Variant(self.key, self.salt, number)

    def choose(self, name: str, options: Sequence[Any]) -> Any:
        """One of the options, for what the student sees: the first in the public variant."""
        return options[0] if self.public else random.Random(f"{self.key}/shown/{name}").choice(list(options))

    def rng(self, name: str) -> random.Random:
        """A generator for what only the check sees: sizes, values, which fault is planted."""
        return random.Random(f"{self.key}/{self.salt}/{self.round}/{name}")

    def whole(self, name: str, least: int, most: int) -> int:
        """A whole number from `least` to `most`, both included, of this round."""
        return self.rng(name).randint(least, most)

    def seed(self, name: str) -> int:
        """A seed of this round, for `torch.Generator().manual_seed`."""
        return self.rng(name).randrange(2**31)
