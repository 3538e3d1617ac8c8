"""Answers and entities over a text: every letter kept, every span marked where it lies, errors named and counted."""

from html.parser import HTMLParser

import pytest

from labkit import viz
from labkit.errors import MaskError
from labkit.viz.text_figures import KINDS, _compared, _lanes

TEXT = 'Marie Curie & Pierre <b>Curie</b>\nwent to "Paris" and Warsaw.'


class Reader(HTMLParser):
    """The first paragraph with marks: each letter with the styles that lie over it; chips apart."""

    def __init__(self, markup):
        super().__init__(convert_charrefs=True)
        self.open, self.letters, self.chips, self.tags, self.inside = [], [], [], set(), False
        self.feed(markup)

    def handle_starttag(self, tag, attributes):
        style = dict(attributes).get("style", "")
        self.tags.add(tag)
        if tag == "p" and "pre-wrap" in style:
            self.inside = True
        self.open.append((tag, style))

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag  # well-formed
        self.inside = self.inside and tag != "p"

    def handle_data(self, data):
        if not self.inside:
            return
        styles = [style for tag, style in self.open if tag == "span"]
        if any("border-radius:6px" in style for style in styles):
            self.chips.append((len(self.letters), data))
        else:
            self.letters += [(letter, styles) for letter in data]


def spans(reader, part):
    """The stretches of letters under one style that contains `part`."""
    found = {}
    for i, (_, styles) in enumerate(reader.letters):
        for style in styles:
            if part in style:
                found.setdefault(style, []).append(i)
    return sorted((places[0], places[-1] + 1) for places in found.values())


def at(words, label=None):
    start = TEXT.index(words)
    return (start, start + len(words)) + ((label,) if label else ())


# --------------------------------------------------------------------------------------------------------- answers
ANSWERS = [(*at("Curie"), 0.2), (*at("Marie Curie"), 0.62), (*at("Paris"), 0.05), (*at("Marie Curie & Pierre"), 0.1)]


def test_the_text_is_kept_letter_by_letter_and_every_answer_underlined_where_it_lies():
    reader = Reader(viz.answer_figure(TEXT, ANSWERS, at("Pierre")))
    assert "".join(letter for letter, _ in reader.letters) == TEXT
    assert spans(reader, "border-bottom") == sorted(answer[:2] for answer in ANSWERS)
    assert spans(reader, "border-top") == [at("Pierre")]


def test_answers_that_overlap_are_underlined_at_different_depths_and_in_different_strokes():
    reader = Reader(viz.answer_figure(TEXT, ANSWERS))
    styles = reader.letters[TEXT.index("Curie")][1]
    assert len(styles) == 3
    assert len({style.split("padding-bottom:")[1] for style in styles}) == 3
    assert len({style.split()[1] for style in styles}) == 3  # solid, dashed, dotted
    assert _lanes([(0, 4), (2, 6), (4, 8), (5, 6)]) == [0, 1, 0, 2]


def test_every_answer_carries_its_rank_and_probability():
    figure = viz.answer_figure(TEXT, ANSWERS, question='Who & "where"?')
    chips = Reader(figure).chips
    expected = [(at("Marie Curie")[1], "1: 62%"), (at("Curie")[1], "2: 20%")]
    expected += [(at("Marie Curie & Pierre")[1], "3: 10%"), (at("Paris")[1], "4: 5.0%")]
    assert chips == expected
    assert figure.alt.startswith('Answers to "Who & "where"?" in a text of ')
    assert '1. "Marie Curie" 62%; 2. "Curie" 20%; 3. "Marie Curie & Pierre" 10%; 4. "Paris" 5.0%.' in figure.alt


def test_the_ninth_answer_and_further_ones_are_said_to_be_left_out():
    figure = viz.answer_figure(TEXT, [(i, i + 1, 0.05) for i in range(11)])
    assert len(Reader(figure).chips) == 8
    assert "and 3 more spans, together 15%" in figure and "and 3 more" in figure.alt


def test_a_gold_answer_may_be_one_of_several():
    figure = viz.answer_figure(TEXT, [(*at("Paris"), 1.0)], [at("Paris"), at("Warsaw")])
    assert spans(Reader(figure), "border-top") != [] and 'Gold: "Paris"; "Warsaw".' in figure.alt
    assert figure.count(" gold</td>") == 1


# -------------------------------------------------------------------------------------------------------- entities
GOLD = [at("Marie Curie", "PER"), at("Pierre", "PER"), at("Paris", "LOC"), at("Warsaw", "LOC")]
PREDICTED = [at("Marie Curie", "PER"), at("& Pierre", "PER"), at("Paris", "ORG"), at("went", "MISC")]


def test_entities_are_right_wrong_missed_or_spurious():
    figure = viz.entities_figure(TEXT, GOLD, PREDICTED)
    said = "1 right, 1 wrong label, 1 wrong boundary, 0 wrong boundary and label, 1 missed, 1 spurious."
    assert figure.alt.startswith(f"Entities, gold against predicted: {said}")
    assert '"Paris" ORG, gold LOC: wrong label.' in figure.alt and '"Warsaw" LOC: missed.' in figure.alt
    reader = Reader(figure)
    assert "".join(letter for letter, _ in reader.letters) == TEXT
    assert [words for _, words in reader.chips] == ["✓ PER", "↔ PER", "+ MISC", "≠ ORG, gold LOC", "○ LOC"]
    assert spans(reader, "background") == sorted(entity[:2] for entity in PREDICTED)
    marked = {i for i, (_, styles) in enumerate(reader.letters) if any("border-bottom" in style for style in styles)}
    assert marked == {i for start, end, _ in GOLD for i in range(start, end)}


def test_the_best_match_goes_first_and_each_entity_is_used_once():
    gold = [(0, 4, "A"), (5, 9, "B")]
    found = _compared(gold, [(0, 9, "A"), (5, 9, "B")])
    assert [kind for kind, *_ in found] == ["wrong boundary", "right"]
    found = _compared([(0, 9, "A")], [(0, 3, "A"), (4, 9, "A")])  # one gold entity split in two
    assert sorted(kind for kind, *_ in found) == ["spurious", "wrong boundary"]
    assert next(guess for kind, _, guess in found if kind == "wrong boundary") == (4, 9, "A")  # the longer part
    assert [kind for kind, *_ in _compared([(0, 4, "A")], [(2, 6, "B")])] == ["wrong boundary and label"]
    assert [kind for kind, *_ in _compared([(0, 4, "A")], [(4, 6, "A")])] == ["missed", "spurious"]


def test_each_kind_has_a_sign_and_a_colour_of_its_own():
    assert len({sign for sign, *_ in KINDS.values()}) == len({colour for _, colour, _ in KINDS.values()}) == len(KINDS)


def test_a_text_without_entities_is_shown_all_the_same():
    figure = viz.entities_figure(TEXT, [], [])
    assert "".join(letter for letter, _ in Reader(figure).letters) == TEXT
    assert "0 right" in figure.alt


# ------------------------------------------------------------------------------------------------------------ both
@pytest.mark.parametrize(
    "make", [lambda t: viz.answer_figure(t, [(0, 3, 0.5)]), lambda t: viz.entities_figure(t, [(0, 3, "A")], [])]
)
def test_figures_hold_no_script_and_nothing_of_the_texts_markup(make):
    reader = Reader(make("<script>alert(1)</script>\x00\x1b & <img src=x onerror=y>"))
    assert not reader.tags & {"script", "img", "style", "link"}
    assert "\x00" not in make("a b c\x00")


def test_a_notebook_shows_the_figure_and_its_words():
    from IPython.core.formatters import DisplayFormatter

    figure = viz.answer_figure(TEXT, ANSWERS)
    bundle, _ = DisplayFormatter().format(figure)
    assert bundle["text/html"] == str(figure) and bundle["text/plain"] == f"Picture: {figure.alt}"
    assert 'role="figure" aria-label="Answers in a text' in figure


CANNOT_BE_SHOWN = {
    "a span beyond the text": lambda: viz.answer_figure("abc", [(0, 4, 0.5)]),
    "an empty span": lambda: viz.answer_figure("abc", [(1, 1, 0.5)]),
    "a span backwards": lambda: viz.answer_figure("abc", [(2, 1, 0.5)]),
    "a probability above 1": lambda: viz.answer_figure("abc", [(0, 1, 1.5)]),
    "a probability that is NaN": lambda: viz.answer_figure("abc", [(0, 1, float("nan"))]),
    "a span without probability": lambda: viz.answer_figure("abc", [3]),
    "no text": lambda: viz.answer_figure("", []),
    "gold beyond the text": lambda: viz.answer_figure("abc", [], (0, 9)),
    "an entity without label": lambda: viz.entities_figure("abc", [(0, 1)], []),
    "an entity beyond the text": lambda: viz.entities_figure("abc", [], [(0, 9, "A")]),
    "entities that overlap": lambda: viz.entities_figure("abc", [(0, 2, "A"), (1, 3, "A")], []),
}


@pytest.mark.parametrize("make", CANNOT_BE_SHOWN.values(), ids=CANNOT_BE_SHOWN.keys())
def test_what_cannot_be_shown_is_refused_with_a_sentence(make):
    with pytest.raises(MaskError) as refusal:
        make()
    assert len(str(refusal.value).split()) >= 6
