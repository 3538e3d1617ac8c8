"""Models that more than one acceptance test needs."""

from pathlib import Path

import pytest

import labkit


@pytest.fixture(scope="session")
def without_dropout(tmp_path_factory) -> Path:
    """A folder with gpt2-mini without dropout: its loss depends only on its weights and the rows."""
    folder = tmp_path_factory.mktemp("models") / "gpt2-mini"
    lm = labkit.load("gpt2-mini", device="cpu")
    for place in ("attn", "embd", "resid"):
        setattr(lm.model.config, f"{place}_pdrop", 0.0)
    lm.model.save_pretrained(folder)
    lm.tokenizer.save_pretrained(folder)
    return folder
