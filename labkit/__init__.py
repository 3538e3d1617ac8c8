"""labkit: write an attention mask, apply it to a model, and measure the mask in force.

The public verbs load on first use, so `import labkit` is instant and needs neither torch nor transformers.
"""

# ruff: noqa: F401
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what a type checker reads of the names below
    from labkit import convert, errors, masks, models, notebooks, pitfalls, profile, viz
    from labkit.auditing.leaks import find_leaks
    from labkit.auditing.measure import AuditReport, assert_bidirectional, assert_causal, audit
    from labkit.convert import masked, to_bidirectional, to_causal
    from labkit.errors import ConversionError, LabkitError
    from labkit.models import Loaded, load
    from labkit.tasks.pipeline import pipeline
    from labkit.viz.explorer import explore_attention

__version__ = "0.1.0"

_SUBMODULES = ("convert", "errors", "masks", "models", "notebooks", "pitfalls", "profile", "viz")
_NAMES = {  # module -> the public names that it defines
    "auditing.leaks": ("find_leaks",),
    "auditing.measure": ("AuditReport", "assert_bidirectional", "assert_causal", "audit"),
    "convert": ("masked", "to_bidirectional", "to_causal"),
    "errors": ("ConversionError", "LabkitError"),
    "models": ("Loaded", "load"),
    "tasks.pipeline": ("pipeline",),
    "viz.explorer": ("explore_attention",),
}
_HOME = {name: module for module, names in _NAMES.items() for name in names}

__all__ = sorted(["__version__", *_SUBMODULES, *_HOME])


def __getattr__(name: str) -> Any:
    """Import the module behind a public name the first time it is asked for (PEP 562)."""
    if name in _SUBMODULES:
        return import_module(f"labkit.{name}")
    if name in _HOME:
        value = getattr(import_module(f"labkit.{_HOME[name]}"), name)
    elif name.endswith("Error") and hasattr(errors := import_module("labkit.errors"), name):
        value = getattr(errors, name)
    else:
        raise AttributeError(_unknown(name))
    globals()[name] = value  # the next access costs nothing
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _unknown(name: str) -> str:
    from difflib import get_close_matches

    close = get_close_matches(name, __all__, n=1)
    hint = f"Did you mean labkit.{close[0]}?" if close else f"Public names: {', '.join(__all__)}."
    return f"module 'labkit' has no attribute {name!r}. {hint}"
