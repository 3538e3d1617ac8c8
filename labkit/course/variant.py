"""The variant of an assignment: which sentences, sizes and seeds it asks about.

The public variant is the same for everybody. A secret makes a private one. Its key, a digest of the secret, is written
into the students' notebooks: it determines what they are shown and what their own checks ask. What graders ask also
depends on the salt, another digest, which cannot be computed without the secret.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from labkit.errors import CourseError

PUBLIC = "public"


@dataclass(frozen=True)
class Variant:
    """Draws by name: the same name draws the same value, in any order. Salt and round change only what checks ask."""

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
        return cls(*(hashlib.sha256(f"labkit {use} {secret}".encode()).hexdigest()[:16] for use in ("key", "salt")))

    @property
    def public(self) -> bool:
        return self.key == PUBLIC

    def choose(self, name: str, options: Sequence[Any]) -> Any:
        """One of the options, for what the student sees: the first in the public variant."""
        return options[0] if self.public else random.Random(f"{self.key}/shown/{name}").choice(list(options))

    def rng(self, name: str) -> random.Random:
        """A generator for what only the check sees: sizes, values, which fault is planted."""
        return random.Random(f"{self.key}/{self.salt}/{self.round}/{name}")

    def whole(self, name: str, least: int, most: int) -> int:
        """A whole number from `least` to `most`, both included."""
        return self.rng(name).randint(least, most)

    def seed(self, name: str) -> int:
        """A seed for `torch.Generator().manual_seed`."""
        return self.rng(name).randrange(2**31)
