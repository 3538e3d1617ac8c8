"""The catalogue of false conversions: recipes that are meant to make a causal model bidirectional and fail.

Of the 34 that run on a text model, 11 never make it bidirectional, 12 do so under some conditions only (backend,
padding), and 11 always do and get something else wrong (windows, packing, positions, the computation). The supported
switch, `config.is_causal = False`, is among the last 11: it opens the mask, and leaves windows and packed documents
wrong.

>>> from labkit import pitfalls
>>> exhibit = pitfalls.get("layer-flag-off")
>>> print(exhibit)                     # what people write, why it looks right, when it works
>>> exhibit.apply(model)               # in place
>>> exhibit.caught_by(labkit.audit(model))

`VERIFICATIONS` holds checks that a model which is still causal passes.
"""

import difflib

from labkit.errors import LabkitError
from labkit.pitfalls import flags, own_masks, partial, rewrites
from labkit.pitfalls.exhibit import Pitfall, Verification
from labkit.pitfalls.verifications import VERIFICATIONS

ALL: tuple[Pitfall, ...] = (*flags.EXHIBITS, *own_masks.EXHIBITS, *partial.EXHIBITS, *rewrites.EXHIBITS)

__all__ = ["ALL", "VERIFICATIONS", "Pitfall", "Verification", "get"]


def get(name: str) -> Pitfall:
    """The exhibit called `name`. Raises `LabkitError`, with the closest one, if there is none."""
    by_name = {pitfall.name: pitfall for pitfall in ALL}
    if name in by_name:
        return by_name[name]
    close = difflib.get_close_matches(name, by_name, n=1)
    hint = f"did you mean {close[0]!r}?" if close else "labkit.pitfalls.ALL lists them"
    raise LabkitError(f"no pitfall is called {name!r}; {hint}")
