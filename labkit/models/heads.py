"""Task heads for every decoder family that transformers knows, on one plan: backbone, dropout, (pooling,) linear head.

    lm = labkit.load("gemma3-270m", task="question-answering")
    lm = labkit.load("gemma3-270m", task=Head("token-classification", labels=("O", "B-PER", "I-PER")))

transformers has no question-answering head for any Gemma and no token head for Gemma 3, and its sequence head pools the
last token whose id is not the pad's, which is wrong where pad and end-of-text are one token (GPT-2). So the heads here
are one mixin for all families. A class per family is made on first use from the family's own PreTrainedModel, so it
has the family's weight names, attention backends, gradient checkpointing and `save_pretrained`.

The choice is recorded in `config.labkit_head`: `labkit.load(folder)` gives the same head back, and `AutoModel` of plain
transformers reads the backbone from the same folder.
"""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from labkit.decoder.anatomy import find_decoder
from labkit.errors import ModelError

TASKS = ("token-classification", "question-answering", "sequence-classification", "embedding")
INITIALISATIONS = ("normal", "zeros", "xavier")
IGNORED = -100  # the label of a token that does not count
RECORD = "labkit_head"  # in the config
POOLINGS = (  # how the states of a sequence become one vector; padding is never included
    "first",  # of the real tokens; under a causal mask it does not depend on the others
    "last",
    "mean",
    "weighted_mean",  # by position, 1, 2, 3, ...: later tokens of a causal model have more context (SGPT, 2202.08904)
    "attention_query",  # one learned query per head attends to the states (arXiv 1810.00825, 2503.02656)
    "attention_kv",  # the states attend to learned keys and values, then the mean (NV-Embed, arXiv 2405.17428)
)
PROBES = 64  # learned keys and values of attention_kv


@dataclass(frozen=True)
class Head:
    """What is put on the decoder.

    Attributes:
        task: one of `TASKS`.
        labels: the classes of token and sequence classification, in the order of the logits. Empty means two classes
            without names. The other tasks have no labels.
        pooling: one of `POOLINGS`, for sequence classification and embedding. "last" by default, because only the last
            token of a causal model has the whole text as its context.
        pooling_heads: number of heads of the attention poolings.
        dropout: on the input of the linear head.
        backbone_dropout: on the output of every attention and feed-forward block; None leaves the model as it is: 0.1
            in GPT-2, none in Gemma and Llama.
        init: of the linear head: "normal" (the model's own standard deviation), "zeros" or "xavier".
        normalize: embeddings of length 1.

    Raises:
        ModelError: a value that is not one of these, one label, a label twice, labels of a task without.
    """

    task: str
    labels: Sequence[str] = ()
    pooling: str = "last"
    pooling_heads: int = 1
    dropout: float = 0.1
    backbone_dropout: float | None = None
    init: str = "normal"
    normalize: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "labels", list(self.labels))
        choices = {"task": TASKS, "pooling": POOLINGS, "init": INITIALISATIONS}
        for name, allowed in choices.items():
            if (value := getattr(self, name)) not in allowed:
                raise ModelError(f"{name} is {value!r}; choose one of {', '.join(allowed)}")
        if self.labels and not self.task.endswith("classification"):
            raise ModelError(f"{self.task} has no labels, but {len(self.labels)} are given")
        if len(self.labels) == 1 or len(set(self.labels)) < len(self.labels):
            raise ModelError(f"labels are {self.labels}; give at least two, each once")
        for name in ("dropout", "backbone_dropout"):
            if (share := getattr(self, name)) is not None and not 0 <= share < 1:
                raise ModelError(f"{name.replace('_', ' ')} is a share in [0, 1), not {share}")

    @property
    def width(self) -> int | None:
        """Outputs of the linear head: a start and an end, or one per class; None for embeddings, which have none."""
        return {"question-answering": 2, "embedding": None}.get(self.task, len(self.labels) or 2)

    def recorded(self, config: Any) -> Any:
        """A copy of `config` with this head in it, and its labels where transformers keeps labels."""
        config = copy.deepcopy(config)
        setattr(config, RECORD, asdict(self))
        if self.task.endswith("classification"):
            names = self.labels or tuple(f"LABEL_{i}" for i in range(self.width))
            config.id2label = dict(enumerate(names))
            config.label2id = {name: i for i, name in enumerate(names)}
        return config


def head_in(config: Any) -> Head | None:
    """The head that the configuration of a model records, or None."""
    record = getattr(config, RECORD, None)
    return None if record is None else Head(**record)


@cache
def model_class(base: type, task: str) -> type:
    """The class of `base` (a bare decoder such as `Gemma3TextModel`) with a head for `task`, made once."""
    from transformers import PreTrainedModel

    family = next(parent for parent in base.__mro__[1:] if issubclass(parent, PreTrainedModel))
    kind = {
        "token-classification": _ForTokens,
        "question-answering": _ForSpans,
        "sequence-classification": _ForSequences,
        "embedding": _ForEmbedding,
    }[task]
    name = f"{base.__name__.removesuffix('Model')}{kind.__name__.lstrip('_')}"
    return type(name, (kind, family), {"__module__": __name__, "_backbone": base, "__doc__": kind.__doc__})


class _WithHead:
    """The mixin that the four kinds share. The backbone is the attribute that the family calls `base_model_prefix`."""

    def __init__(self, config: Any):
        super().__init__(config)
        self.head_settings = head = head_in(config)
        self.head_is_new = True  # until `labkit.load` has read a trained one
        setattr(self, self.base_model_prefix, self._backbone(config))
        width = config.get_text_config().hidden_size
        if head.task in ("sequence-classification", "embedding"):
            self.pooling = make_pooling(head.pooling, width, head.pooling_heads)
        self.head_dropout = nn.Dropout(head.dropout)
        if head.width is not None:
            self.head = nn.Linear(width, head.width)
        if head.backbone_dropout is not None:
            set_backbone_dropout(self.backbone, head.backbone_dropout)
        self.post_init()

    @property
    def backbone(self) -> nn.Module:
        return getattr(self, self.base_model_prefix)

    def get_input_embeddings(self) -> nn.Module:
        return self.backbone.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.backbone.set_input_embeddings(value)

    def start_head(self, dtype: torch.dtype | None = None) -> list[str]:
        """Initialise the head, and the pooling if it learns, again; returns the names of their weights.

        They are drawn on the CPU, so that a seed gives the same head on every device, and in `dtype`, which they keep;
        None: in the one they have.
        """
        for child in self._own().values():
            device = next((weight.device for weight in child.parameters()), None)
            child.to(device="cpu", dtype=dtype)
            for module in child.modules():
                self._init_weights(module)
            child.to(device=device)
        return sorted(
            f"{name}.{weight}" for name, child in self._own().items() for weight, _ in child.named_parameters()
        )

    def head_sha256(self) -> str:
        """The sha256 of the weights of the head and of the pooling: equal for two models that start alike."""
        return sha256_of(weight for child in self._own().values() for weight in child.state_dict().values())

    def _own(self) -> dict[str, nn.Module]:
        return {name: child for name, child in self.named_children() if child is not self.backbone}

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialise as the family does, except for the head and the probes of the pooling."""
        super()._init_weights(module)
        if module is getattr(self, "head", None):
            if self.head_settings.init == "zeros":
                nn.init.zeros_(module.weight)
            elif self.head_settings.init == "xavier":
                nn.init.xavier_uniform_(module.weight)
            else:
                nn.init.normal_(module.weight, std=getattr(self.config.get_text_config(), "initializer_range", 0.02))
            nn.init.zeros_(module.bias)
        elif isinstance(module, AttentionPooling):
            nn.init.normal_(module.probe, std=1.0)

    def _states(self, input_ids, attention_mask, options: dict) -> Tensor:
        options.pop("num_items_in_batch", None)
        options["use_cache"] = False
        return self.backbone(input_ids, attention_mask=attention_mask, **options).last_hidden_state

    def _scored(self, states: Tensor) -> Tensor:
        return self.head(self.head_dropout(_in_dtype_of(self.head, states)))

    def _pooled(self, states: Tensor, attention_mask: Tensor | None) -> Tensor:
        if attention_mask is None:
            attention_mask = states.new_ones(states.shape[:2], dtype=torch.long)
        return self.pooling(_in_dtype_of(self.pooling, states), attention_mask)


class _ForTokens(_WithHead):
    """One class per token: logits (batch, seq, labels). Labels of -100 do not count."""

    def forward(self, input_ids=None, attention_mask=None, labels=None, **options):
        from transformers.modeling_outputs import TokenClassifierOutput

        logits = self._scored(self._states(input_ids, attention_mask, options))
        loss = None if labels is None else _cross_entropy(logits, labels)
        return TokenClassifierOutput(loss=loss, logits=logits)


class _ForSpans(_WithHead):
    """A start and an end: logits (batch, seq) each. The loss is the mean of both cross-entropies over the row.

    `start_positions` and `end_positions`, (batch,), index the row; padding cannot be chosen.
    """

    def forward(self, input_ids=None, attention_mask=None, start_positions=None, end_positions=None, **options):
        from transformers.modeling_outputs import QuestionAnsweringModelOutput

        logits = self._scored(self._states(input_ids, attention_mask, options))  # (batch, seq, 2)
        if attention_mask is not None and attention_mask.dim() == 2:
            logits = logits.masked_fill(attention_mask[..., None] == 0, torch.finfo(logits.dtype).min)
        start, end = logits.unbind(-1)  # each (batch, seq)
        loss = None
        if start_positions is not None and end_positions is not None:
            loss = (_cross_entropy(start, start_positions) + _cross_entropy(end, end_positions)) / 2
        return QuestionAnsweringModelOutput(loss=loss, start_logits=start, end_logits=end)


class _ForSequences(_WithHead):
    """One class per sequence: logits (batch, labels)."""

    def forward(self, input_ids=None, attention_mask=None, labels=None, **options):
        from transformers.modeling_outputs import SequenceClassifierOutput

        logits = self._scored(self._pooled(self._states(input_ids, attention_mask, options), attention_mask))
        loss = None if labels is None else _cross_entropy(logits, labels)
        return SequenceClassifierOutput(loss=loss, logits=logits)


class _ForEmbedding(_WithHead):
    """One vector per sequence: `pooler_output` (batch, width), of length 1 if the head says so."""

    def forward(self, input_ids=None, attention_mask=None, **options):
        from transformers.modeling_outputs import BaseModelOutputWithPooling

        states = self._states(input_ids, attention_mask, options)
        vectors = self.head_dropout(self._pooled(states, attention_mask))
        if self.head_settings.normalize:
            vectors = nn.functional.normalize(vectors.float(), dim=-1)
        return BaseModelOutputWithPooling(last_hidden_state=states, pooler_output=vectors)


def _in_dtype_of(module: nn.Module, states: Tensor) -> Tensor:
    """The states in the dtype of the module: a head on a 16-bit backbone is trained in float32."""
    return states.to(next(module.parameters(), states).dtype)


def make_pooling(name: str, width: int, heads: int = 1) -> nn.Module:
    """A module `(states (batch, seq, width), attention_mask (batch, seq)) -> (batch, width)`.

    Raises ModelError if the heads do not divide the width.
    """
    if not name.startswith("attention"):
        return PlainPooling(name)
    if width % heads:
        raise ModelError(f"{heads} pooling heads do not divide the width {width}")
    return AttentionPooling(width, heads, probe_is_query=name == "attention_query")


class PlainPooling(nn.Module):
    """A fixed weighted mean of the states; nothing is learned."""

    def __init__(self, name: str):
        super().__init__()
        self.name = name

    def forward(
        self, states: Float[Tensor, "batch seq width"], attention_mask: Int[Tensor, "batch seq"]
    ) -> Float[Tensor, "batch width"]:
        real = attention_mask.to(torch.long)
        order = real.cumsum(-1) * real  # 1 for the first real token, 2 for the next; 0 for padding; either side
        weights = {
            "first": order == 1,
            "last": (order == order.amax(-1, keepdim=True)) & (order > 0),
            "mean": order > 0,
            "weighted_mean": order,
        }[self.name].to(torch.float32)  # in float16 the sum of positions overflows at 362 tokens
        weights = weights / weights.sum(-1, keepdim=True).clamp_min(1)
        return torch.einsum("bs,bsw->bw", weights, states.float()).to(states.dtype)


class AttentionPooling(nn.Module):
    """Multi-head attention between the states and learned probes, with an output projection.

    With `probe_is_query` one probe attends to the states. Otherwise every state attends to `PROBES` probes, and the
    results are averaged over the real tokens.
    """

    def __init__(self, width: int, heads: int, *, probe_is_query: bool):
        super().__init__()
        self.heads, self.probe_is_query = heads, probe_is_query
        self.probe = nn.Parameter(torch.randn(1 if probe_is_query else PROBES, width))
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(
        self, states: Float[Tensor, "batch seq width"], attention_mask: Int[Tensor, "batch seq"]
    ) -> Float[Tensor, "batch width"]:
        probes = self.probe.to(states.dtype).expand(len(states), -1, -1)  # (batch, probes, width)
        queries, keys = (probes, states) if self.probe_is_query else (states, probes)
        q, k, v = self._split(self.query(queries)), self._split(self.key(keys)), self._split(self.value(keys))
        scores = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).float()  # (batch, head, queries, keys)
        if self.probe_is_query:
            scores = scores.masked_fill(attention_mask[:, None, None, :] == 0, torch.finfo(scores.dtype).min)
        mixed = (scores.softmax(-1).to(v.dtype) @ v).transpose(1, 2).flatten(2)  # (batch, queries, width)
        if self.probe_is_query:
            return self.out(mixed[:, 0])
        return PlainPooling("mean")(self.out(mixed), attention_mask)

    def _split(self, x: Float[Tensor, "batch seq width"]) -> Float[Tensor, "batch head seq part"]:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


def set_backbone_dropout(model: nn.Module, share: float) -> None:
    """Apply dropout to the output of every attention and feed-forward block, in training only.

    The dropout modules of the family are set if it has some (GPT-2), and added if it has none (Gemma, Llama). A second
    call replaces the share. Dropout of the attention weights is not changed: flex attention has none.
    """
    decoder = find_decoder(model)
    for layer, attention in zip(decoder.layers, decoder.attentions, strict=True):
        own = [m for name, m in layer.named_modules() if isinstance(m, nn.Dropout) and "attn_dropout" not in name]
        own = [m for m in own if not isinstance(m, _BlockDropout)]
        if own:
            for module in own:
                module.p = share
            continue
        for block in (attention, layer.mlp):
            if not hasattr(block, "labkit_dropout"):
                block.labkit_dropout = _BlockDropout(share).train(block.training)
                block.register_forward_hook(_drop)
            block.labkit_dropout.p = share


class _BlockDropout(nn.Dropout):
    """Dropout that labkit added to a block."""


def _drop(block: nn.Module, inputs: Any, output: Any) -> Any:
    if isinstance(output, tuple):
        return (block.labkit_dropout(output[0]), *output[1:])
    return block.labkit_dropout(output)


def sha256_of(weights: Iterable[Tensor]) -> str:
    """The sha256 of the weights as float32, one after the other."""
    together = hashlib.sha256()
    for weight in weights:
        together.update(weight.detach().float().cpu().numpy().tobytes())
    return together.hexdigest()


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean over the labels that count, in float32; logits (..., classes), labels (...)."""
    return nn.functional.cross_entropy(logits.flatten(0, -2).float(), labels.flatten(), ignore_index=IGNORED)


def label_names(labels: Sequence[str]) -> tuple[str, ...]:
    """The classes of a data set, sorted, with "O" first."""
    return tuple(sorted(set(labels), key=lambda name: (name != "O", name)))
