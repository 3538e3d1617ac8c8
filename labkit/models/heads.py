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
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from labkit.decoder.anatomy import find_decoder
from labkit.errors import ModelError, require_one_of

TASKS = {  # and how the classes of models with such a head are called: GPT2ForTokens
    "token-classification": "ForTokens",
    "question-answering": "ForSpans",
    "sequence-classification": "ForSequences",
    "embedding": "ForEmbedding",
}
SHORT_NAMES = {  # of `labkit train`, for the same tasks
    "ner": "token-classification",
    "qa": "question-answering",
    "classify": "sequence-classification",
    "embed": "embedding",
}
INITIALISATIONS = {  # of the weight of the linear head, by the standard deviation of the model's own weights
    "normal": lambda weight, std: nn.init.normal_(weight, std=std),
    "zeros": lambda weight, std: nn.init.zeros_(weight),
    "xavier": lambda weight, std: nn.init.xavier_uniform_(weight),
}
RECORD = "labkit_head"  # in the config
POOLINGS = (  # how the states of a sequence become one vector; padding is never included
    "first",  # of the real tokens; under a causal mask it does not depend on the others
    "last",
    "mean",
    "weighted_mean",  # by position, 1, 2, 3, ...: later tokens of a causal model have more context (SGPT, 2202.08904)
    "attention_query",  # one learned query attends to the states (arXiv 1810.00825, 2503.02656)
    "attention_kv",  # the states attend to learned keys and values, then the mean (NV-Embed, arXiv 2405.17428)
)
PROBES = 64  # learned keys and values of attention_kv


@dataclass(frozen=True)
class Head:
    """What is put on the decoder.

    Attributes:
        task: one of `TASKS`, or a key of `SHORT_NAMES`.
        labels: the classes of token and sequence classification, in the order of the logits. Empty means two classes
            without names. The other tasks have no labels.
        pooling: one of `POOLINGS`, for sequence classification and embedding. "last" by default, because only the last
            token of a causal model has the whole text as its context.
        dropout: on the input of the linear head.
        backbone_dropout: on the output of every attention and feed-forward block; None leaves the model as it is: 0.1
            in GPT-2, none in Gemma and Llama.
        init: of the linear head, one of `INITIALISATIONS`.
    """

    task: str
    labels: Sequence[str] = ()
    pooling: str = "last"
    dropout: float = 0.1
    backbone_dropout: float | None = None
    init: str = "normal"

    def __post_init__(self) -> None:
        object.__setattr__(self, "labels", list(self.labels))
        object.__setattr__(self, "task", SHORT_NAMES.get(self.task, self.task))
        choices = {"task": [*TASKS, *SHORT_NAMES], "pooling": POOLINGS, "init": INITIALISATIONS}
        for name, allowed in choices.items():
            require_one_of(name, getattr(self, name), allowed, ModelError)
        if self.labels and not self.task.endswith("classification"):
            raise ModelError(f"{self.task} has no labels, but {len(self.labels)} are given")
        if len(self.labels) == 1 or len(set(self.labels)) < len(self.labels):
            raise ModelError(f"labels are {self.labels}; give at least two, each once")
        if not (0 <= self.dropout < 1 and 0 <= (self.backbone_dropout or 0) < 1):
            raise ModelError(f"dropout is {self.dropout} and {self.backbone_dropout}; give shares in [0, 1)")

    def recorded(self, config: Any) -> Any:
        """A copy of `config` with this head in it, and its labels where transformers keeps labels."""
        config = copy.deepcopy(config)
        setattr(config, RECORD, asdict(self))
        if self.task.endswith("classification"):
            config.id2label = dict(enumerate(self.labels or ("LABEL_0", "LABEL_1")))
            config.label2id = {name: number for number, name in config.id2label.items()}
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
    name = base.__name__.removesuffix("Model") + TASKS[task]
    return type(name, (_WithHead, family), {"__module__": __name__, "_backbone": base})


class _WithHead:
    """The mixin of all heads. The backbone is the attribute that the family calls `base_model_prefix`."""

    def __init__(self, config: Any):
        super().__init__(config)
        self.head_settings = head = head_in(config)
        self.head_is_new = True  # until `labkit.load` has read a trained one
        setattr(self, self.base_model_prefix, self._backbone(config))
        width = config.get_text_config().hidden_size
        if head.task in ("sequence-classification", "embedding"):
            self.pooling = Pooling(head.pooling, width)
        self.head_dropout = nn.Dropout(head.dropout)
        if head.task != "embedding":
            self.head = nn.Linear(width, len(head.labels) or 2)  # two: of classes, or a start and an end
        if head.backbone_dropout is not None:
            _add_backbone_dropout(self.backbone, head.backbone_dropout)
        self.post_init()

    def forward(
        self, input_ids=None, attention_mask=None, labels=None, start_positions=None, end_positions=None, **options
    ):
        """The output, by task, and the loss if labels or positions are given.

        token-classification: logits (batch, seq, labels); labels (batch, seq), in which -100 does not count.
        question-answering: start and end logits (batch, seq), where padding cannot be chosen; `start_positions` and
            `end_positions` (batch,) index the row, and the loss is the mean of both cross-entropies.
        sequence-classification: logits (batch, labels); labels (batch,).
        embedding: `pooler_output` (batch, width), of length 1.
        """
        from transformers import modeling_outputs as outputs

        options.pop("num_items_in_batch", None)
        options["use_cache"] = False
        states = self.backbone(input_ids, attention_mask=attention_mask, **options).last_hidden_state
        features, pooled = states, hasattr(self, "pooling")
        if pooled:
            real = states.new_ones(states.shape[:2], dtype=torch.long) if attention_mask is None else attention_mask
            features = self.pooling(states, real)
        features = self.head_dropout(features)
        if self.head_settings.task == "embedding":
            vectors = F.normalize(features.float(), dim=-1)
            return outputs.BaseModelOutputWithPooling(last_hidden_state=states, pooler_output=vectors)
        logits = self.head(_in_dtype_of(self.head, features))
        loss = None if labels is None else _cross_entropy(logits, labels)
        if self.head_settings.task != "question-answering":
            kind = outputs.SequenceClassifierOutput if pooled else outputs.TokenClassifierOutput
            return kind(loss=loss, logits=logits)
        if attention_mask is not None and attention_mask.dim() == 2:
            logits = logits.masked_fill(attention_mask[..., None] == 0, torch.finfo(logits.dtype).min)
        start, end = logits.unbind(-1)  # each (batch, seq)
        if start_positions is not None and end_positions is not None:
            loss = (_cross_entropy(start, start_positions) + _cross_entropy(end, end_positions)) / 2
        return outputs.QuestionAnsweringModelOutput(loss=loss, start_logits=start, end_logits=end)

    @property
    def backbone(self) -> nn.Module:
        return getattr(self, self.base_model_prefix)

    def start_head(self, dtype: torch.dtype | None = None) -> list[str]:
        """Initialise the head, and the pooling if it learns, again; returns the names of their weights.

        They are drawn on the CPU, so that a seed gives the same head on every device, and in `dtype`, which they keep;
        None: in the one they have.
        """
        for child in self._own().values():
            child.to(device="cpu", dtype=dtype)
            for module in child.modules():
                self._init_weights(module)
            child.to(device=self.backbone.device)
        return sorted(f"{name}.{weight}" for name, child in self._own().items() for weight in child.state_dict())

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
            std = getattr(self.config.get_text_config(), "initializer_range", 0.02)
            INITIALISATIONS[self.head_settings.init](module.weight, std)
            nn.init.zeros_(module.bias)
        elif isinstance(module, Pooling) and module.learns:
            nn.init.normal_(module.probe, std=1.0)


class Pooling(nn.Module):
    """The pooling `name`, one of `POOLINGS`; the attention poolings have learned probes, and one attention head."""

    def __init__(self, name: str, width: int):
        super().__init__()
        self.name, self.learns = name, name.startswith("attention")
        if self.learns:
            self.probe = nn.Parameter(torch.randn(1 if name == "attention_query" else PROBES, width))
            self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(
        self, states: Float[Tensor, "batch seq width"], attention_mask: Int[Tensor, "batch seq"]
    ) -> Float[Tensor, "batch width"]:
        name = self.name
        if self.learns:
            states = _in_dtype_of(self, states)
            probes = self.probe.expand(len(states), -1, -1)  # (batch, probes, width)
            if name == "attention_query":
                return self._attend(probes, states, attention_mask[:, None, :] > 0)[:, 0]
            states, name = self._attend(states, probes, None), "mean"
        real = attention_mask.to(torch.long)
        order = real.cumsum(-1) * real  # 1 for the first real token, 2 for the next; 0 for padding; either side
        weights = {
            "first": order == 1,
            "last": (order == order.amax(-1, keepdim=True)) & (order > 0),
            "mean": order > 0,
            "weighted_mean": order,
        }[name].to(torch.float32)  # in float16 the sum of positions overflows at 362 tokens
        weights = weights / weights.sum(-1, keepdim=True).clamp_min(1)
        return torch.einsum("bs,bsw->bw", weights, states.float()).to(states.dtype)

    def _attend(self, queries: Tensor, keys: Tensor, mask: Tensor | None) -> Tensor:
        """Queries (batch, queries, width), keys (batch, keys, width) and mask (batch, 1, keys) to queries' shape."""
        attended = F.scaled_dot_product_attention(self.query(queries), self.key(keys), self.value(keys), attn_mask=mask)
        return self.out(attended)


def _add_backbone_dropout(backbone: nn.Module, share: float) -> None:
    """Apply dropout to the output of every attention and feed-forward block, in training only.

    GPT-2 has dropout modules for that, which are set; Gemma and Llama have none. Dropout of the attention weights is
    not changed: flex attention has none.
    """
    decoder = find_decoder(backbone)
    for layer, attention in zip(decoder.layers, decoder.attentions, strict=True):
        modules = layer.named_modules()
        dropouts = [m for name, m in modules if isinstance(m, nn.Dropout) and "attn_dropout" not in name]
        for dropout in dropouts:
            dropout.p = share
        for block in () if dropouts else (attention, layer.mlp):
            block.register_forward_hook(partial(_drop, share))


def _drop(share: float, block: nn.Module, inputs: Any, output: Any) -> Any:
    if isinstance(output, tuple):
        return (F.dropout(output[0], share, block.training), *output[1:])
    return F.dropout(output, share, block.training)


def sha256_of(weights: Iterable[Tensor]) -> str:
    """The sha256 of the weights as float32, one after the other."""
    digest = hashlib.sha256()
    for weight in weights:
        digest.update(weight.detach().float().cpu().numpy().tobytes())
    return digest.hexdigest()


def _in_dtype_of(module: nn.Module, states: Tensor) -> Tensor:
    """The states in the dtype of the module: a head on a 16-bit backbone is trained in float32."""
    return states.to(next(module.parameters()).dtype)


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean over the labels that count (not -100), in float32; logits (..., classes), labels (...)."""
    return F.cross_entropy(logits.flatten(0, -2).float(), labels.flatten())
