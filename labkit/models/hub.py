"""Model folders, as `save_pretrained` writes them, and the hub, from which such a folder is fetched first.

Weights are read from safetensors only: nothing is ever unpickled, and no code that comes with a model is ever run.
"""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labkit.errors import ModelError, reading
from labkit.models.heads import RECORD, TASKS, Head, head_in, model_class
from labkit.models.registry import cached_id, closest_names
from labkit.progress import bars_on_terminals_only, transformers_errors_only

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

_SMALL_FILES = ["config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json"]
_SMALL_FILES += ["vocab.json", "merges.txt", "chat_template.jinja"]
_WEIGHTS = ["model.safetensors", "model-*-of-*.safetensors", "model.safetensors.index.json"]
_DECODERS = "labkit takes decoders such as GPT-2, Gemma or Llama"

BODIES = {None: "AutoModelForCausalLM", "base": "AutoModel"}


def fetch(hub_ids: tuple[str, ...], *, weights: bool) -> Path:
    """The local folder of a hub model, downloaded if necessary: the configuration and tokenizer, or the `weights` too.

    `hub_ids` are the repository and its older names; without a network a copy in the hub's own cache is used. Raises
    ModelError if the hub cannot be reached or refuses, or the repository has no safetensors.
    """
    import httpx
    import huggingface_hub
    from huggingface_hub import errors

    hub_id = cached_id(hub_ids) or hub_ids[0]
    try:
        with bars_on_terminals_only():
            files = _SMALL_FILES + (_WEIGHTS if weights else [])
            folder = Path(huggingface_hub.snapshot_download(hub_id, allow_patterns=files))
    except errors.HFValidationError as error:
        raise ModelError(f"{hub_id!r} is neither a folder nor a possible hub id (owner/name)") from error
    except errors.HfHubHTTPError as error:
        status = getattr(error.response, "status_code", None)
        if isinstance(error, errors.RepositoryNotFoundError) and not isinstance(error, errors.GatedRepoError):
            raise ModelError(
                f"the hub has no model {hub_id!r} that you may read; check the spelling, or, if it is private, log in "
                "with `hf auth login`"
            ) from error
        if isinstance(error, errors.GatedRepoError) or status in (401, 403):
            raise ModelError(
                f"the hub refuses {hub_id} (HTTP {status}): accept its licence at https://huggingface.co/{hub_id}, "
                "then log in with `hf auth login` or set HF_TOKEN to a token of the same account"
            ) from error
        raise _unreachable(hub_id, f"the hub answered HTTP {status}") from error
    except (OSError, httpx.HTTPError) as error:  # offline mode, too, is an OSError
        if getattr(error, "errno", None) in (errno.ENOSPC, errno.EACCES, errno.EROFS):  # a file cannot be written
            raise
        raise _unreachable(hub_id, "the hub cannot be reached") from error
    if not (folder / "config.json").is_file() or (weights and not list(folder.glob("*.safetensors"))):
        if list(folder.glob("*.bin")):
            require_weights(folder, hub_id)
        raise _unreachable(hub_id, "only part of it is in the hub cache, or it has no safetensors weights")
    return folder


def _unreachable(hub_id: str, cause: str) -> ModelError:
    similar = [name for name in closest_names(hub_id) if name != hub_id]
    return ModelError(
        f"{hub_id} is not on this machine and {cause}; connect to the network, or download it elsewhere "
        f"(`hf download {hub_id} --local-dir DIR`) and load the folder, or take a model that works offline "
        "(gemma3-270m, tiny-gemma3)" + (f"; similar names: {', '.join(similar)}" if similar else "")
    )


def read_config(folder: Path, name: str, *, encoders: bool = False) -> PreTrainedConfig:
    """The configuration in `folder`. Raises ModelError unless it is that of a decoder, or, if allowed, an encoder."""
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM

    if not (folder / "config.json").is_file():
        raise ModelError(
            f"{name} holds no config.json, so it is not a model folder; point to the folder that save_pretrained wrote"
        )
    with reading(f"the configuration of {name}"):
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    kind = f"{name} is a {config.model_type} model"
    if config.is_encoder_decoder:
        raise ModelError(f"{kind}, an encoder-decoder; {_DECODERS}")
    if (encoders or head_in(config) is not None) and _concrete_class(AutoModel, config) is not None:
        return config
    # BERT and similar encoders are also registered as causal models, for the decoder half of a translation model
    if _concrete_class(AutoModelForMaskedLM, config) is not None and not getattr(config, "is_decoder", False):
        cure = "to compare with one, load it with a head, or its body alone (task='base')"
        raise ModelError(f"{kind}, which is not a decoder; {_DECODERS}; {cure}", kind="encoder")
    if _concrete_class(AutoModelForCausalLM, config) is None:
        raise ModelError(f"{kind}, which is not a decoder; {_DECODERS}")
    return config


def class_for(config: PreTrainedConfig, task: str | Head | None, name: str) -> tuple[type, PreTrainedConfig]:
    """The model class for `task`, and the configuration to make it with (a copy if it is to have another head).

    A task of `heads` gives the family's class with labkit's head on it, and so does None if the configuration records
    one. Raises ModelError if transformers has no such model.
    """
    import transformers

    saved = head_in(config)
    if task is None or (saved is not None and task == saved.task):
        task = saved
    elif task in TASKS:
        task = Head(task)
    if isinstance(task, Head):
        config = task.recorded(config)
    elif task not in BODIES:
        raise ModelError(f"task is {task!r}; choose one of {', '.join(map(repr, [*BODIES, *TASKS]))}")
    auto_class = getattr(transformers, "AutoModel" if isinstance(task, Head) else BODIES[task])
    concrete = _concrete_class(auto_class, config)
    if concrete is None:
        raise ModelError(f"transformers has no {auto_class.__name__} for {config.model_type} ({name})")
    return (model_class(concrete, task.task) if isinstance(task, Head) else concrete), config


def _concrete_class(auto_class: Any, config: PreTrainedConfig) -> type | None:
    try:
        concrete = auto_class._model_mapping[type(config)]
    except KeyError:
        return None
    return concrete[0] if isinstance(concrete, list | tuple) else concrete


def require_weights(folder: Path, name: str) -> None:
    """Raise ModelError unless `folder` holds safetensors weights."""
    if list(folder.glob("*.safetensors")):
        return
    if list(folder.glob("*.bin")) or list(folder.glob("*.pt")):
        raise ModelError(
            f"{name} has only pickled weights (*.bin), which can run code when opened; labkit reads safetensors only: "
            "convert it with save_pretrained where you trust it"
        )
    raise ModelError(f"{name} holds a config.json but no *.safetensors weights; save or download the model again")


def read_model(
    folder: Path, name: str, kind: type, config: PreTrainedConfig, *, attn: str, dtype: Any
) -> tuple[PreTrainedModel, str]:
    """The model in `folder` on the CPU, in eval mode, and a remark if it has a new, untrained head.

    A saved head is kept only if it has the task, labels and pooling of the one in `config`. Raises ModelError if the
    files lack any other weight, which transformers would fill with random numbers.
    """
    with reading(f"{name} with attn={attn!r}"), bars_on_terminals_only(), transformers_errors_only():
        model, report = kind.from_pretrained(
            folder, config=config, attn_implementation=attn, dtype=dtype, use_safetensors=True,
            local_files_only=True, output_loading_info=True, ignore_mismatched_sizes=True,
        )  # fmt: skip
    new = sorted({*report["missing_keys"], *(key for key, *_ in report["mismatched_keys"])})
    body = "" if model.base_model is model else f"{model.base_model_prefix}."
    # the pooler of an encoder is not used, and many are saved without one
    if lost := [weight for weight in new if weight.startswith(body) and not weight.startswith(f"{body}pooler.")]:
        raise ModelError(
            f"{name} lacks {len(lost)} weights of its model, or has them in another shape, the first is {lost[0]}; "
            "save or download it again"
        )
    if (head := head_in(config)) is not None:
        saved = json.loads((folder / "config.json").read_text(encoding="utf-8")).get(RECORD)
        if saved is not None and any(saved[key] != getattr(head, key) for key in ("task", "labels", "pooling")):
            new = model.start_head()
        model.head_is_new = bool(new)
    return model.eval(), f"its head is new and untrained ({', '.join(new)})" if new else ""


def read_tokenizer(folder: Path, name: str) -> tuple[Any, str]:
    """The tokenizer in `folder` and a remark on what was set on it; (None, remark) if the folder has none."""
    from transformers import AutoTokenizer

    if not any((folder / file).is_file() for file in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        return None, "without a tokenizer, as the folder holds none"
    with reading(f"the tokenizer of {name}"):
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        tokenizer("a text")  # some faults show only when it is used
    tokenizer.padding_side = "right"
    if tokenizer.pad_token is None and tokenizer.eos_token is not None:
        tokenizer.pad_token = tokenizer.eos_token
        return tokenizer, f"pads with its end-of-text token {tokenizer.eos_token}, as it has no pad token"
    return tokenizer, ""
