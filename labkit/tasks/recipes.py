"""What the fine-tuning of each task needs, under one form: rows, loss, predictions, scores, and what to beat.

    RECIPES["qa"].features(tokenizer, questions, (), options)

`labkit.tasks.finetune` knows no task; whatever differs from one to the next stands here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from labkit.errors import DataError
from labkit.models.heads import Head, label_names
from labkit.tasks import classify, embed, embed_scores, ner, ner_counts, qa, qa_scores

NEVER_NULL = 1e9  # a threshold that "no answer" never reaches


@dataclass(frozen=True)
class Options:
    """The choices of the tasks. None takes the task's own default; a choice of another task is an error.

    Attributes:
        max_length: tokens per row (qa 384, others 256).
        doc_stride: how much later the next window starts (qa), or how many tokens two windows share (ner).
        order: "question-first" or "question-last" (qa): with the question last, a causal model reads the context
            without knowing what is asked.
        prompt: "plain", or "evidence" for `[INST] .. [POST] .. [CRITERION] ..` (qa).
        max_answer_tokens: of an answer (qa).
        null_threshold: "no answer" where it scores higher than the best span by more than this (qa). None: chosen on
            the dev set if that has questions without an answer, else every question is answered.
        label_on: "last" or "first" token of a word (ner).
        pooling: how a text becomes one vector (classify, embed).
    """

    max_length: int | None = None
    doc_stride: int | None = None
    order: str | None = None
    prompt: str | None = None
    max_answer_tokens: int | None = None
    null_threshold: float | None = None
    label_on: str | None = None
    pooling: str | None = None

    def filled(self, recipe: Recipe) -> Options:
        """With the recipe's defaults. DataError for a choice that the task does not have."""
        chosen = {name: value for name, value in asdict(self).items() if value is not None}
        if foreign := sorted(set(chosen) - set(recipe.defaults)):
            names = ", ".join(name.replace("_", " ") for name in foreign)
            raise DataError(f"{recipe.name} has no {names}; it has {', '.join(recipe.defaults).replace('_', ' ')}")
        return replace(self, **(recipe.defaults | chosen))


@dataclass(frozen=True)
class Recipe:
    """A task to fine-tune on.

    Attributes:
        name: as in `labkit train NAME`. head_task: of `labkit.models.heads`.
        metric: (examples, options) -> the name of the score that chooses the best checkpoint.
        defaults: of the `Options` that the task has.
        labels: the classes in the training examples, () where there are none.
        features: (tokenizer, examples, labels, options) -> rows for the model; `length_of` one in tokens.
        collator: pad id -> what makes a batch of rows.
        loss: (model, batch) -> number to minimise.
        predict: (model, tokenizer, examples, labels, options, batch_size) -> what the model says, one per example.
        measure: the same arguments -> (scores, predictions); the metric is among the scores.
        tuned: (options, scores on dev) -> the options with what is chosen on dev.
        baselines: (train, examples) -> what is reached without a model, by name.
        record: a prediction as one line of JSONL.
        judge: (examples, predictions) -> what is right of each, in numbers that add up to the scores, with what is
            known of the example; None where a score is not made of single examples.

    """

    name: str
    head_task: str
    metric: Callable[[Sequence[Any], Options], str]
    defaults: dict[str, Any]
    labels: Callable[[Sequence[Any]], Sequence[str]]
    features: Callable[..., list[Any]]
    length_of: Callable[[Any], int]
    collator: Callable[[int], Callable]
    loss: Callable[..., Any]
    predict: Callable[..., list[Any]]
    measure: Callable[..., tuple[dict[str, Any], list[Any]]]
    baselines: Callable[..., dict[str, float]]
    record: Callable[[Any], dict[str, Any]]
    tuned: Callable[[Options, dict[str, Any]], Options] = lambda options, scores: options
    judge: Callable[..., list[dict[str, Any]]] | None = None

    def head(self, labels: Sequence[str], options: Options, **changes: Any) -> Head:
        """The head that the task is trained with."""
        if self.head_task in ("sequence-classification", "embedding"):
            changes = {"pooling": options.pooling} | changes
        return Head(self.head_task, labels=labels, **changes)


def require_positions(recipe: Recipe, lm: Any, examples: Sequence[Any], options: Options, readings: int = 1) -> None:
    """DataError if a row, read `readings` times, is longer than the model has positions."""
    places = getattr(lm.model.config.get_text_config(), "max_position_embeddings", None)
    if not places or options.max_length * readings <= places:
        return
    rows = recipe.features(lm.tokenizer, examples, recipe.labels(examples), options, lambda text: None)
    longest, first = max(map(recipe.length_of, rows)), rows[0]
    ids = first.ids if hasattr(first, "ids") else first.sides[0]
    once = int(ids[0]) == lm.tokenizer.bos_token_id  # a row's beginning is not repeated
    if (total := (longest - once) * readings + once) > places:
        again = f", which makes {total:,} in {readings} readings" if readings > 1 else ""
        raise DataError(
            f"the longest row has {longest:,} tokens{again}, and {lm.name} has {places:,} positions; give "
            f"--max-length {(places - once) // readings + once}"
        )


def by_name(name: str) -> Recipe:
    """The recipe called `name`. Raises DataError, listing the tasks, if there is none."""
    if name not in RECIPES:
        raise DataError(f"the task is {name!r}; choose one of {', '.join(RECIPES)}")
    return RECIPES[name]


# -- questions ---------------------------------------------------------------------------------------------------------


def _qa_features(
    tokenizer: Any, questions: Sequence[Any], labels: Sequence[str], options: Options, say: Any
) -> list[Any]:
    return qa.windows(tokenizer, questions, **_qa_rows(options), say=say)


def _qa_rows(options: Options) -> dict[str, Any]:
    return {name: getattr(options, name) for name in ("max_length", "doc_stride", "order", "prompt")}


def _qa_predict(model, tokenizer, questions, labels, options, batch_size=16):
    return qa.predict(
        model, tokenizer, questions, **_qa_rows(options), max_answer_tokens=options.max_answer_tokens,
        null_threshold=0.0 if options.null_threshold is None else options.null_threshold, batch_size=batch_size,
        say=lambda text: None,
    )  # fmt: skip


def _qa_measure(model, tokenizer, questions, labels, options, batch_size):
    """The official scores; where a threshold is to be chosen, those at the best one on these questions beside them."""
    if all(each.answers for each in questions):
        options = _always_answering(options)
    predictions = _qa_predict(model, tokenizer, questions, labels, options, batch_size)
    found = qa_scores.scores(questions, predictions)
    if _qa_metric(questions, options) == "best_f1":
        threshold, best = qa_scores.best_threshold(questions, predictions)
        found |= {"best_f1": best, "best_f1_threshold": threshold}
    return found, predictions


def _qa_metric(questions: Sequence[Any], options: Options) -> str:
    to_choose = options.null_threshold is None and any(not each.answers for each in questions)
    return "best_f1" if to_choose else "f1"


def _qa_tuned(options: Options, scores: dict[str, Any]) -> Options:
    if "best_f1_threshold" in scores:
        return replace(options, null_threshold=scores["best_f1_threshold"])
    return _always_answering(options)


def _always_answering(options: Options) -> Options:
    """Where every question has an answer (SQuAD 1.1), none is held back, unless a threshold was asked for."""
    return options if options.null_threshold is not None else replace(options, null_threshold=NEVER_NULL)


def _qa_baselines(train: Sequence[Any], questions: Sequence[Any]) -> dict[str, float]:
    """Never an answer; always the sentence that shares most words with the question."""
    answers = {"no_answer": lambda question: "", "lexical_overlap": qa_scores.lexical_overlap}
    return {
        name: float(np.mean([qa_scores.f1(answer(each), [a.text for a in each.answers]) for each in questions]))
        for name, answer in answers.items()
    }


def _qa_record(prediction: Any) -> dict[str, Any]:
    best = [asdict(each) for each in prediction.n_best[:5]]
    fields = ("id", "text", "start", "end", "probability", "null_score_diff")
    return {name: getattr(prediction, name) for name in fields} | {"n_best": best}


# -- entities ----------------------------------------------------------------------------------------------------------


def _ner_rows(options: Options) -> dict[str, Any]:
    return {"max_length": options.max_length, "stride": options.doc_stride, "label_on": options.label_on}


def _ner_features(tokenizer, sentences, labels, options, say):
    found = ner.features(tokenizer, sentences, labels, **_ner_rows(options))
    if lost := sum(len(each.lost) for each in found):
        say(f"{lost:,} words have no token of their own and cannot be labelled (they are predicted as O)")
    return [each for each in found if each.words]  # of a row without words there is no loss


def _ner_predict(model, tokenizer, sentences, labels, options, batch_size=16):
    return ner.predict(model, tokenizer, sentences, labels, **_ner_rows(options), batch_size=batch_size)


def _ner_measure(model, tokenizer, sentences, labels, options, batch_size):
    """Of the legal tags; `f1_raw` is that of the tags as the model gave them, strictly read."""
    tagged = _ner_predict(model, tokenizer, sentences, labels, options, batch_size)
    raw = ner.scores(sentences, [each.raw_tags for each in tagged])["f1"]
    return ner.scores(sentences, [each.tags for each in tagged]) | {"f1_raw": raw}, tagged


def _ner_baselines(train: Sequence[Any], sentences: Sequence[Any]) -> dict[str, float]:
    return {name: ner.scores(sentences, tags)["f1"] for name, tags in ner.majority_baseline(train, sentences).items()}


def _ner_record(tagged: Any) -> dict[str, Any]:
    entities = [asdict(entity) | {"text": text} for entity, text in zip(tagged.entities, tagged.texts, strict=True)]
    return {
        "id": tagged.id,
        "entities": entities,
        "tags": list(tagged.tags),
        "probabilities": list(tagged.probabilities),
    }


# -- sentences ---------------------------------------------------------------------------------------------------------


def _classify_features(tokenizer, examples, labels, options, say):
    found = classify.features(tokenizer, examples, labels, max_length=options.max_length)
    return _with_cuts_said(found, options, say)


def _with_cuts_said(found: list[Any], options: Options, say: Any) -> list[Any]:
    if cut := classify.cut_texts(found):
        say(f"{cut:,} of {len(found):,} texts have more than {options.max_length} tokens and were cut at their end")
    return found


def _classify_predict(model, tokenizer, examples, labels, options, batch_size=16):
    return classify.predict(model, tokenizer, examples, labels, batch_size=batch_size, max_length=options.max_length)


def _classify_measure(model, tokenizer, examples, labels, options, batch_size):
    predictions = _classify_predict(model, tokenizer, examples, labels, options, batch_size)
    return classify.scores(examples, predictions), predictions


def _classify_baselines(train: Sequence[Any], examples: Sequence[Any]) -> dict[str, float]:
    """Accuracies: always the commonest class; a logistic regression on the words, where there are any."""
    found = {"majority": classify.majority_baseline(train, examples)}
    if any(re.search(r"\w", each.text) for each in train):  # there may be emoji alone
        found["bag_of_words"] = classify.scores(examples, classify.bag_of_words(train, examples))["accuracy"]
    return found


def _embed_features(tokenizer, pairs, labels, options, say):
    return _with_cuts_said(embed.pair_features(tokenizer, pairs, max_length=options.max_length), options, say)


def _embed_vectors(model, tokenizer, pairs, options, batch_size):
    options = {"batch_size": batch_size, "max_length": options.max_length}
    sides = [
        embed.encode(model, tokenizer, texts, **options)
        for texts in ([pair.first for pair in pairs], [pair.second for pair in pairs])
    ]
    return list(zip(*sides, strict=True))


def _similarities(pairs: Sequence[Any], vectors: Sequence[Any]) -> list[dict[str, Any]]:
    """The cosine of each pair's two texts."""
    return [
        {"id": pair.id, "similarity": float(one @ two / (one @ one * (two @ two)) ** 0.5)}
        for pair, (one, two) in zip(pairs, vectors, strict=True)
    ]


def _embed_predict(model, tokenizer, pairs, labels, options, batch_size=16):
    return _similarities(pairs, _embed_vectors(model, tokenizer, pairs, options, batch_size))


def _embed_measure(model, tokenizer, pairs, labels, options, batch_size):
    vectors = _embed_vectors(model, tokenizer, pairs, options, batch_size)
    return embed_scores.pair_scores(pairs, vectors), _similarities(pairs, vectors)


def _embed_metric(pairs: Sequence[Any], options: Options | None = None) -> str:
    return "spearman" if pairs[0].score is not None else "mean_reciprocal_rank"


def _embed_baselines(train: Sequence[Any], pairs: Sequence[Any]) -> dict[str, float]:
    """The same score, of vectors that count words."""
    return {"bag_of_words": embed_scores.bag_of_words(pairs)[_embed_metric(pairs)]}


RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe(
            name="qa",
            head_task="question-answering",
            metric=_qa_metric,
            defaults={
                "max_length": 384, "doc_stride": 128, "order": "question-first", "prompt": "plain",
                "max_answer_tokens": 30, "null_threshold": None,
            },
            labels=lambda examples: (),
            features=_qa_features,
            length_of=lambda row: len(row.ids),
            collator=qa.Collator,
            loss=classify.loss,
            predict=_qa_predict,
            measure=_qa_measure,
            baselines=_qa_baselines,

            record=_qa_record,
            tuned=_qa_tuned,
            judge=qa_scores.judged,
        ),
        Recipe(
            name="ner",
            head_task="token-classification",
            metric=lambda examples, options: "f1",
            defaults={"max_length": 256, "doc_stride": 64, "label_on": "last"},
            labels=ner.labels_of,
            features=_ner_features,
            length_of=lambda row: len(row.ids),
            collator=ner.Collator,
            loss=classify.loss,
            predict=_ner_predict,
            measure=_ner_measure,
            baselines=_ner_baselines,

            record=_ner_record,
            judge=ner_counts.judged,
        ),
        Recipe(
            name="classify",
            head_task="sequence-classification",
            metric=lambda examples, options: "accuracy",
            defaults={"max_length": 256, "pooling": "last"},
            labels=lambda examples: label_names([each.label for each in examples]),
            features=_classify_features,
            length_of=lambda row: len(row.ids),
            collator=classify.Collator,
            loss=classify.loss,
            predict=_classify_predict,
            measure=_classify_measure,
            baselines=_classify_baselines,

            record=asdict,
            judge=classify.judged,
        ),
        Recipe(
            name="embed",
            head_task="embedding",
            metric=_embed_metric,
            defaults={"max_length": 256, "pooling": "mean"},
            labels=lambda examples: (),
            features=_embed_features,
            length_of=lambda row: sum(len(side) for side in row.sides),
            collator=embed.Collator,
            loss=embed.loss,
            predict=_embed_predict,
            measure=_embed_measure,
            baselines=_embed_baselines,
            record=dict,
        ),
    )
}  # fmt: skip
