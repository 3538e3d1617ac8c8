"""Model folders, as `save_pretrained` writes them: which class for which task, on which attention backend.

Weights are read from safetensors only: nothing is ever unpickled, and no code that comes with a model is ever run.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labkit.decoder import limits
from labkit.decoder.anatomy import CONVERSION
from labkit.errors import ModelError, reading, require_one_of
from labkit.files import quiet_libraries
from labkit.models.heads import RECORD, Head, head_in, model_class

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


def read_folder(
    folder: Path, name: str, *, attn: str | None, dtype: Any, device: str, task: str | Head | None
) -> tuple[PreTrainedModel, Any, list[str]]:
    """The model in `folder` in eval mode, its tokenizer (None if it has none), and remarks on what was chosen.

    A conversion that labkit recorded is applied again.
    """
    kind, config, attn, remarks = prepare(folder, name, attn=attn, dtype=dtype, device=device, task=task)
    if not list(folder.glob("*.safetensors")):
        reasons = "only part of it is here, or they are pickled (*.bin), which labkit never reads"
        raise ModelError(f"{name} has no *.safetensors weights: {reasons}; save it again with save_pretrained")
    with reading(f"{name} with attn={attn!r}"):
        model, new = _read_weights(folder, name, kind, config, attn=attn, dtype=dtype or "auto")
        model.to(device)
        if getattr(config.get_text_config(), CONVERSION, None) is not None:
            from labkit.convert import prove_conversion

            prove_conversion(model)
    if new:
        remarks.append(f"its head is new and untrained ({', '.join(new)})")
    tokenizer = _read_tokenizer(folder, name)
    if tokenizer is None:
        remarks.append("without a tokenizer, as the folder holds none")
    elif tokenizer.pad_token is None and tokenizer.eos_token is not None:
        tokenizer.pad_token = tokenizer.eos_token
        remarks.append(f"pads with its end-of-text token {tokenizer.eos_token}, as it has no pad token")
    return model, tokenizer, remarks


def prepare(
    folder: Path, name: str, *, attn: str | None, dtype: Any, device: str, task: str | Head | None
) -> tuple[type, PreTrainedConfig, str, list[str]]:
    """The class, configuration and attention backend of the model in `folder`, and remarks; reads no weights."""
    import torch
    from transformers import AutoConfig

    with reading(name):
        if not (folder / "config.json").is_file():
            raise ModelError(f"{name} holds no config.json; point to a folder that save_pretrained wrote")
        if "command" in json.loads((folder / "config.json").read_text(encoding="utf-8")):
            models = [str(file.parent) for file in sorted(folder.glob("**/model/config.json"))]
            cure = f"give its model, {models[0]}" if models else "it has no model yet"
            raise ModelError(f"{name} is the folder of a training run, not a model: {cure}")
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        kind, config = class_for(config, task, name)
        attn, remarks = choose_attention(kind, config, attn, name)
        parameters = limits.configured_parameters(config, kind)
        limits.require_memory_for_model(name, parameters, dtype or config.dtype or torch.float32, device)
    return kind, config, attn, remarks


def class_for(config: PreTrainedConfig, task: str | Head | None, name: str) -> tuple[type, PreTrainedConfig]:
    """The model class for `task`, and the configuration to make it with (a copy if it is to have another head).

    A task of `heads` gives the family's class with labkit's head on it, and so does None if the configuration records
    one. Without a head, only decoders and bodies alone (`task="base"`) are taken.
    """
    from transformers import AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM

    saved, head = head_in(config), task
    if task is None or task == "base":
        head = saved if task is None else None
    elif isinstance(task, str):
        head = saved if saved is not None and saved.task == task else Head(task)
    predicts_text = task is None and head is None
    kind = _concrete_class(AutoModelForCausalLM if predicts_text else AutoModel, config)
    # BERT and similar encoders are also registered as causal models, for the decoder half of a translation model
    is_encoder = _concrete_class(AutoModelForMaskedLM, config) is not None and not getattr(config, "is_decoder", False)
    if config.is_encoder_decoder or kind is None or (is_encoder and predicts_text):
        is_encoder = is_encoder and not config.is_encoder_decoder
        cure = "; an encoder loads with a head, or its body alone (task='base')" if is_encoder else ""
        raise ModelError(
            f"{name} is a {config.model_type} model; labkit takes decoders such as GPT-2, Gemma or Llama{cure}",
            kind="encoder" if is_encoder else "",
        )
    return (kind, config) if head is None else (model_class(kind, head.task), head.recorded(config))


def choose_attention(model_class: type, config: Any, attn: str | None, name: str) -> tuple[str, list[str]]:
    """The attention backend, and a remark if it is not the default.

    torch's sdpa has no softcap: older releases of transformers ignore it without a warning, newer ones refuse.
    """
    softcap = getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None
    sdpa, flex, flash = (
        getattr(model_class, f"_supports_{kind}", False) for kind in ("sdpa", "flex_attn", "flash_attn")
    )
    supported = {"eager": True, "sdpa": sdpa and not softcap, "flex_attention": flex}
    supported |= {"flash_attention_2": flash, "flash_attention_3": flash}
    if attn is None:
        reason = "its softcap is lost in sdpa" if softcap else "it has no sdpa"
        return ("sdpa", []) if supported["sdpa"] else ("eager", [f"eager attention, as {reason}"])
    choices = [backend for backend, works in supported.items() if works]
    require_one_of(f"{name} ({model_class.__name__}): attn", attn, choices, ModelError)
    return attn, []


def _concrete_class(auto_class: Any, config: PreTrainedConfig) -> type | None:
    concrete = auto_class._model_mapping.get(type(config), None)
    return concrete[0] if isinstance(concrete, list | tuple) else concrete


def _read_weights(
    folder: Path, name: str, kind: type, config: PreTrainedConfig, *, attn: str, dtype: Any
) -> tuple[PreTrainedModel, list[str]]:
    """The model on the CPU, in eval mode, and the names of the weights of its head that are new and untrained.

    A saved head is kept only if it has the task, labels and pooling of the one in `config`. If the files lack any other
    weight, that is an error, because transformers would fill it with random numbers.
    """
    with quiet_libraries():
        model, report = kind.from_pretrained(
            folder, config=config, attn_implementation=attn, dtype=dtype, use_safetensors=True,
            local_files_only=True, output_loading_info=True, ignore_mismatched_sizes=True,
        )  # fmt: skip
    new = sorted({*report["missing_keys"], *(key for key, *_ in report["mismatched_keys"])})
    body = "" if model.base_model is model else f"{model.base_model_prefix}."
    # the pooler of an encoder is not used, and many are saved without one
    if lost := [weight for weight in new if weight.startswith(body) and not weight.startswith(f"{body}pooler.")]:
        raise ModelError(f"{name} lacks {len(lost)} weights of its model, such as {lost[0]}; save or download it again")
    if (head := head_in(config)) is not None:
        saved = json.loads((folder / "config.json").read_text(encoding="utf-8")).get(RECORD)
        if saved is not None and any(saved[key] != getattr(head, key) for key in ("task", "labels", "pooling")):
            new = model.start_head()
        model.head_is_new = bool(new)
    return model.eval(), new


def _read_tokenizer(folder: Path, name: str) -> Any:
    """The tokenizer in `folder`, padding on the right, or None."""
    from transformers import AutoTokenizer

    if not any((folder / file).is_file() for file in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        return None
    with reading(f"the tokenizer of {name}"):
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        tokenizer("a text")  # some faults show only when it is used
    tokenizer.padding_side = "right"
    return tokenizer
