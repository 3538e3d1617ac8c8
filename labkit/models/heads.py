"""Task heads for every decoder family that transformers knows, on one plan: backbone, dropout, (pooling,) linear head.

    lm = labkit.load("gemma3-270m", task="question-answering")
    lm = labkit.load("gemma3-270m", task=Head("token-classification", labels=("O", "B-PER", "I-PER")))

transformers has no question-answering head for any Gemma and no token head for Gemma 3, and its sequence head pools the
last token whose id is not the pad's, which is wrong where pad and end-of-text are one token (GPT-2). So the heads here
are one mixin for all families: a class per family is made on first use, from the family's own PreTrainedModel, and with
it come its weights' names, attention backends, gradient checkpointing and `save_pretrained`.

What was chosen is kept in `config.labkit_head`; `labkit.load(folder)` gives the same head back, and plain transformers'
`AutoModel` finds the backbone in the same folder.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from labkit.decoder.anatomy import find_decoder
from labkit.errors import HeadError
from labkit.models.pooling import POOLINGS, AttentionPooling, make_pooling

TASKS = ("token-classification", "question-answering", "sequence-classification", "embedding")
INITIALISATIONS = ("normal", "zeros", "xavier")
IGNORED = -100  # the label of a token that does not count
POOLED = ("sequence-classification", "embedding")
RECORD = "labkit_head"  # in the config


@dataclass(frozen=True)
class Head:
    """What is put on the decoder.

    Attributes:
        task: one of `TASKS`.
        labels: the classes, in the order of the logits, of token and sequence classification; kept as a list. Empty
            means two classes without names. The other tasks have no labels.
        pooling: how a sequence becomes one vector (`labkit.models.pooling`), for sequence classification and embedding.
            "last" by default, as a causal model needs it: only its last token has seen everything.
        pooling_heads: of the attention poolings.
        dropout: on what enters the linear head.
        backbone_dropout: on what every attention and every feed-forward block adds to the residual stream; GPT-2 is
            built with 0.1 of it, which None leaves as it is, Gemma and Llama with none.
        init: of the linear head: "normal" (the model's own standard deviation), "zeros" or "xavier".
        normalize: embeddings of length 1.
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
        if self.task not in TASKS:
            raise HeadError(f"task is {self.task!r}; choose one of {', '.join(TASKS)}")
        wanted = self.task in ("token-classification", "sequence-classification")
        if self.labels and not wanted:
            raise HeadError(f"{self.task} has no labels, but {len(self.labels)} are given")
        if len(set(self.labels)) != len(self.labels) or (self.labels and len(self.labels) < 2):
            raise HeadError(f"labels are {list(self.labels)}; give at least two, each once")
        if self.pooling not in POOLINGS:
            raise HeadError(f"pooling is {self.pooling!r}; choose one of {', '.join(POOLINGS)}")
        if self.init not in INITIALISATIONS:
            raise HeadError(f"init is {self.init!r}; choose one of {', '.join(INITIALISATIONS)}")
        for name in ("dropout", "backbone_dropout"):
            if (share := getattr(self, name)) is not None and not 0 <= share < 1:
                raise HeadError(f"{name.replace('_', ' ')} is a share in [0, 1), not {share}")

    @property
    def width(self) -> int | None:
        """How many numbers the linear head gives: a start and an end, or one per class; None without one."""
        return {"question-answering": 2, "embedding": None}.get(self.task, len(self.labels) or 2)

    def recorded(self, config: Any) -> Any:
        """A copy of `config` with this head in it, and its labels where transformers keeps labels."""
        import copy

        config = copy.deepcopy(config)
        setattr(config, RECORD, asdict(self))
        if self.width is not None and self.task != "question-answering":
            names = self.labels or tuple(f"LABEL_{i}" for i in range(self.width))
            config.id2label = dict(enumerate(names))
            config.label2id = {name: i for i, name in enumerate(names)}
        return config


def head_in(config: Any) -> Head | None:
    """The head that a saved model has, or None for one that labkit put no head on."""
    record = getattr(config, RECORD, None)
    if record is None:
        return None
    try:
        return Head(**record)
    except TypeError as error:
        raise HeadError(f"the head recorded in the model's config is not one of this version: {error}") from error


@cache
def model_class(base: type, task: str) -> type:
    """The class of `base` (a bare decoder such as `Gemma3TextModel`) with a head for `task`, made once."""
    from transformers import PreTrainedModel

    family = next(each for each in base.__mro__[1:] if issubclass(each, PreTrainedModel))
    kind = {
        "token-classification": _ForTokens,
        "question-answering": _ForSpans,
        "sequence-classification": _ForSequences,
        "embedding": _ForEmbedding,
    }[task]
    name = f"{base.__name__.removesuffix('Model')}{kind.__name__.lstrip('_')}"
    return type(name, (kind, family), {"__module__": __name__, "_backbone": base, "__doc__": kind.__doc__})


class _WithHead:
    """The mixin that the four kinds share. The backbone stands under the family's own `base_model_prefix`."""

    def __init__(self, config: Any):
        super().__init__(config)
        self.head_settings = head = head_in(config)
        self.head_is_new = True  # until `labkit.load` has read a trained one
        setattr(self, self.base_model_prefix, self._backbone(config))
        width = config.get_text_config().hidden_size
        if head.task in POOLED:
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
        """Start the head, and the pooling if it learns, anew; returns the names of their weights.

        They are drawn on the CPU, so that one seed gives one head whatever the card, and in `dtype`, which they keep;
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
        """Of the weights of the head, and of the pooling if it learns: two models that start alike have the same."""
        return sha256_of(weight for child in self._own().values() for weight in child.state_dict().values())

    def _own(self) -> dict[str, nn.Module]:
        return {name: child for name, child in self.named_children() if child is not self.backbone}

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """As the family starts its own modules, except for the head and the probes of the pooling."""
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
    """A head that is trained on a 16-bit backbone is itself float32."""
    own = next(module.parameters(), states)
    return states.to(own.dtype)


def set_backbone_dropout(model: nn.Module, share: float) -> None:
    """Dropout on what every attention and feed-forward block adds to the residual stream, in training only.

    Where the family has dropout modules of its own (GPT-2) they are set; where it has none (Gemma, Llama) it is added.
    Calling it again replaces the share. Dropout inside the attention weights is not touched: flex attention has none.
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
    """Added by labkit to a block that has none."""


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
    """The classes of a data set, sorted, with "O" first: the same whatever order the data came in."""
    return tuple(sorted(set(labels), key=lambda name: (name != "O", name)))
