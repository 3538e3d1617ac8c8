"""Field Notes: the shipped file and its card, the validator on files broken on purpose, the reader, `labkit data`."""

import hashlib
import json
import re
import shutil
import subprocess
import sys
from collections import Counter
from functools import partial

import pytest
from typer.testing import CliRunner

from labkit import cli_data
from labkit.datasets import catalogue, field_notes
from labkit.datasets.catalogue import CATALOGUE
from labkit.errors import DataError
from labkit.resources import folder

SHIPPED = folder("data") / "field_notes"


# ---- the shipped file and its card ---------------------------------------------------------------------------------


def test_the_shipped_file_keeps_every_rule():
    assert field_notes.validate(SHIPPED / "passages.jsonl") == []


def test_splits_are_disjoint_and_together_the_whole():
    splits = [field_notes.passages(split) for split in field_notes.SPLITS]
    assert [len(passages) for passages in splits] == [118, 25, 25]
    texts = [{passage.text for passage in passages} for passages in splits]
    assert not (texts[0] & texts[1] or texts[0] & texts[2] or texts[1] & texts[2])
    assert sorted((p for s in splits for p in s), key=lambda p: p.id) == field_notes.passages()


def test_the_card_has_the_sha256_of_the_file():
    digest = hashlib.sha256((SHIPPED / "passages.jsonl").read_bytes()).hexdigest()
    assert f"\n{digest}  passages.jsonl\n" in (SHIPPED / "README.md").read_text(encoding="utf-8")


def test_the_counts_of_the_card_are_those_of_the_file():
    rows = [json.loads(line) for line in (SHIPPED / "passages.jsonl").read_text(encoding="utf-8").splitlines()]
    counted = {}
    for key in ("region", "genre"):
        for value in {row[key] for row in rows}:
            counted[value] = Counter(row["split"] for row in rows if row[key] == value)
    counted["passages"] = Counter(row["split"] for row in rows)
    counted["words"], counted["bytes of text"] = Counter(), Counter()
    for row in rows:
        counted["words"][row["split"]] += len(row["text"].split())
        counted["bytes of text"][row["split"]] += len(row["text"].encode())
    card = (SHIPPED / "README.md").read_text(encoding="utf-8").split("\n## Questions\n")[0]
    said = {
        name: [int(number.replace(",", "")) for number in numbers.split("|")]
        for name, numbers in re.findall(r"^\| ([^|]+) \| ([\d,| ]+) \|$", card, re.M)
    }
    assert said == {
        name: [count["train"], count["dev"], count["test"], count.total()] for name, count in counted.items()
    }


# ---- the validator -------------------------------------------------------------------------------------------------


@pytest.fixture
def rows():
    """A file of 120 passages as small as the rules allow: every word in it is its own."""
    return [
        {
            "id": f"fn-{n:03d}",
            "split": field_notes.SPLITS[n // 8 % 3],
            "region": "city",
            "genre": ["news", "travel", "diary", "letter", "review", "minutes", "interview", "field report"][n % 8],
            "title": f"Title {n}",
            "text": prose(80, f"x{n}y"),
        }
        for n in range(1, 121)
    ]


def prose(count, stem):
    """`count` different words that begin with `stem`, in sentences of ten."""
    words = [f"{stem}{i}" for i in range(count)]
    return " ".join(" ".join(words[i : i + 10]) + "." for i in range(0, count, 10))


@pytest.fixture
def write(write_lines):
    """write(rows) -> the path of a file that holds them."""
    return partial(write_lines, "passages.jsonl")


def test_the_smallest_file_the_rules_allow_is_valid(rows, write):
    assert field_notes.validate(write(rows)) == []


def words_of(row, count):
    return " ".join(row["text"].split()[:count]).replace(".", "")


def as_line(row):
    return json.dumps(row).encode()


def sentence_of_another(rows):
    rows[2]["text"] += " Nobody drowned."
    return rows[6] | {"text": "Nobody drowned! " + rows[6]["text"]}


def third_with_its_opening(rows):
    for n in (2, 4, 6):
        rows[n]["text"] = "The boat left " + rows[n]["text"]
    return rows[6]


FAULTS = {  # what is broken in line 7 (the others stay whole) -> what the validator says of it
    "cut off": (lambda r: as_line(r[6])[:-20], r"is not JSON \(Unterminated string"),
    "blank": (lambda r: b"", "is not JSON"),
    "latin-1": (lambda r: as_line(r[6]).replace(b"Title", b"Caf\xe9"), r"is not UTF-8 \(byte \d+\)"),
    "no object": (lambda r: b'["fn-007"]', "is not a JSON object"),
    "no title": (lambda r: {k: v for k, v in r[6].items() if k != "title"}, "lacks title"),
    "a key more": (lambda r: r[6] | {"author": "me"}, "unknown fields: author"),
    "a number": (lambda r: r[6] | {"title": 7}, "title should be text"),
    "empty": (lambda r: r[6] | {"text": " "}, "text should be text, and not empty"),
    "split": (lambda r: r[6] | {"split": "valid"}, "the split is 'valid'; expected train, dev, test"),
    "key order": (lambda r: dict(reversed(r[6].items())), "keys in the order id, split, region, genre, title, text"),
    "key twice": (lambda r: as_line(r[6]).replace(b'"id"', b'"id": "fn-999", "id"'), "is not written as"),
    "escaped": (lambda r: as_line(r[6] | {"title": "Café"}), "is not written as"),
    "windows line end": (lambda r: as_line(r[6]) + b"\r", "is not written as"),
    "id": (lambda r: r[6] | {"id": "fn-7"}, "the id is 'fn-7'; expected the form fn-001"),
    "id of another": (lambda r: r[6] | {"id": "fn-003"}, "the id 'fn-003' stands in line 3 already"),
    "title of another": (lambda r: r[6] | {"title": "title 3"}, "the title 'title 3' stands in line 3 already"),
    "genre": (lambda r: r[6] | {"genre": "Interview"}, "the genre is 'Interview'; expected lower-case words"),
    "region": (lambda r: r[6] | {"region": "the_city"}, "the region is 'the_city'"),
    "79 words": (lambda r: r[6] | {"text": prose(79, "z")}, "has 79 words; expected 80 to 180"),
    "181 words": (lambda r: r[6] | {"text": prose(181, "z")}, "has 181 words; expected 80 to 180"),
    "two titles": (lambda r: r[6] | {"title": "One\nTwo"}, "the title has more than one line"),
    "curly quote": (lambda r: r[6] | {"title": "It’s"}, "the title holds RIGHT SINGLE QUOTATION MARK"),
    "em dash": (lambda r: r[6] | {"text": "So — " + prose(80, "z")}, "the text holds EM DASH"),
    "en dash": (lambda r: r[6] | {"text": "So – " + prose(80, "z")}, "the text holds EN DASH"),
    "emoji": (lambda r: r[6] | {"title": "A \N{SNAIL}"}, "the title holds SNAIL"),
    "tab": (lambda r: r[6] | {"text": "So\tto " + prose(80, "z")}, r"the text holds U\+0009"),
    "bell": (lambda r: r[6] | {"text": "So\a to " + prose(80, "z")}, r"the text holds U\+0007"),
    "hard space": (lambda r: r[6] | {"text": "So\xa0to " + prose(80, "z")}, "the text holds NO-BREAK SPACE"),
    "another alphabet": (lambda r: r[6] | {"title": "Cаfe"}, "the title holds CYRILLIC SMALL LETTER A"),
    "not NFC": (lambda r: r[6] | {"title": "Cafe\u0301"}, "the title is not in Unicode's normal form NFC"),
    "bold": (lambda r: r[6] | {"text": "So **to** " + prose(80, "z")}, r"the text holds markdown: '\*'"),
    "heading": (lambda r: r[6] | {"text": "# So " + prose(80, "z")}, "the text holds markdown: '#'"),
    "bullet": (lambda r: r[6] | {"text": "So:\n- to " + prose(80, "z")}, "the text holds markdown: '- '"),
    "link": (lambda r: r[6] | {"text": "[So](to) " + prose(80, "z")}, r"the text holds markdown: '\['"),
    "double space": (lambda r: r[6] | {"text": "So  to " + prose(80, "z")}, "the text has a space or line break"),
    "space at the start": (lambda r: r[6] | {"text": "\n" + prose(80, "z")}, "the text has a space or line break"),
    "space at the end": (lambda r: r[6] | {"title": "So "}, "the title has a space or line break too many"),
    "three line ends": (lambda r: r[6] | {"text": "So\n\n\n" + prose(80, "z")}, "a space or line break too many"),
    "template": (
        lambda r: r[6] | {"text": f"So {words_of(r[2], 8)} but " + prose(80, "z")},
        "shares 8 words in a row with line 3: 'x3y0 x3y1 x3y2 x3y3 x3y4 x3y5 x3y6 x3y7'",
    ),
    "template at the end": (
        lambda r: r[6] | {"text": f"{prose(80, 'z')} {words_of(r[2], 8)}"},
        "shares 8 words in a row with line 3",
    ),
    "sentence of another": (sentence_of_another, "the sentence 'Nobody drowned!' stands in line 3 already"),
    "sentence twice": (
        lambda r: r[6] | {"text": "Nobody drowned. " + r[6]["text"] + '\n\n"Nobody drowned."'},
        "stands in line 7 already",
    ),
    "opening": (third_with_its_opening, "begins with 'the boat left', as 2 passages before it do"),
}


@pytest.mark.parametrize("kind", FAULTS)
def test_a_broken_line_is_found_and_nothing_else(rows, write, kind):
    breaks, says = FAULTS[kind]
    rows = [dict(row) for row in rows] + [  # one more of each genre and split, so that a lost line leaves enough
        {**rows[n], "id": f"fn-{200 + n}", "title": f"More {n}", "text": prose(80, f"more{n}y")} for n in (6, 14, 22)
    ]
    rows[6] = breaks(rows)
    path = write(rows)
    (found,) = field_notes.validate(path)
    assert re.match(f"{re.escape(str(path))}, line 7: .*{says}", found), found


def test_half_a_character_is_named_in_words_that_can_be_printed(rows, write):
    rows[6] = as_line(rows[6] | {"title": "A \ud800"})
    found = field_notes.validate(write(rows))
    assert [fault for fault in found if "line 7: the title holds U+D800" in fault]
    assert "".join(found).encode("utf-8")


def test_what_is_at_the_limit_is_allowed(rows, write):
    rows[6]["text"] = prose(180, "z")
    rows[8]["text"] = f"So {words_of(rows[2], 7)} but " + prose(80, "q")
    for n in (20, 21):
        rows[n]["text"] = "The boat left " + rows[n]["text"]
    for n in (30, 31):  # the lines of a letter are no sentences
        rows[n]["text"] = f"Sir,\n\n{prose(80, f'v{n}')}\n\nYours faithfully,\nAda"
    rows[32]["text"] = '1. Peat: 3 £/m², 40° at "Brånö" & so on.\n2. ' + prose(80, "p")
    assert field_notes.validate(write(rows)) == []


SHORTAGES = {
    "119 passages": (lambda rows: rows[:119], "holds 119 passages; expected at least 120"),
    "7 genres": (
        lambda rows: [row | {"genre": "news" if row["genre"] == "travel" else row["genre"]} for row in rows],
        "holds 7 genres; expected at least 8",
    ),
    "4 genres in dev": (
        lambda rows: [
            row | {"split": "train"} if row["split"] == "dev" and row["genre"] > "interview" else row for row in rows
        ],
        "the split dev has passages of 3 genres; expected at least 5",
    ),
    "no test": (
        lambda rows: [row | {"split": "train"} if row["split"] == "test" else row for row in rows],
        "the split test has passages of 0 genres",
    ),
}


@pytest.mark.parametrize("kind", SHORTAGES)
def test_too_little_of_something_is_said_of_the_whole_file(rows, write, kind):
    change, says = SHORTAGES[kind]
    path = write(change(rows))
    (found,) = field_notes.validate(path)
    assert found.startswith(f"{path}: ")
    assert says in found


def test_all_faults_are_told_in_the_order_of_the_lines(rows, write):
    rows[50]["id"] = "fn-2"
    rows[3] = b"{"
    rows[20]["title"] = rows[10]["title"]
    found = field_notes.validate(write([*rows, rows[0] | {"id": "fn-200", "title": "More", "text": prose(80, "more")}]))
    assert [re.search(r", line (\d+): ", fault)[1] for fault in found] == ["4", "21", "51"]


def test_a_file_that_is_not_there_is_a_fault_in_words(tmp_path):
    (found,) = field_notes.validate(tmp_path / "none.jsonl")
    assert re.search("none.jsonl: could not be read", found)


# ---- the reader ----------------------------------------------------------------------------------------------------


@pytest.fixture
def data_copy(tmp_path, monkeypatch):
    """A copy of the data folder, which the reader and the commands take for the real one."""
    copy = tmp_path / "data"
    shutil.copytree(SHIPPED, copy / "field_notes")
    for module in (field_notes, catalogue):
        monkeypatch.setattr(module, "folder", lambda name: copy)
    return copy


def test_a_passage_is_read_as_it_stands_in_the_file():
    line = (SHIPPED / "passages.jsonl").read_text(encoding="utf-8").split("\n")[9]
    passage = field_notes.passages()[9]
    assert json.loads(line) == {key: getattr(passage, key) for key in json.loads(line)}
    assert passage.id == "fn-010"


def test_no_such_split_is_refused_with_those_there_are():
    with pytest.raises(DataError, match="no split 'valid'; it has train, dev, test"):
        field_notes.passages("valid")


@pytest.mark.parametrize("damage", [b'{"id": "fn-0', b"", b"\xff\xfe", b"[]", b'{"id": "fn-012"}'])
def test_a_damaged_file_is_refused_with_its_line(data_copy, damage):
    path = data_copy / "field_notes" / "passages.jsonl"
    lines = path.read_bytes().split(b"\n")
    lines[11] = damage
    path.write_bytes(b"\n".join(lines))
    for split in (None, "train"):
        with pytest.raises(DataError, match=re.escape(f"{path}, line 12: ")):
            field_notes.passages(split)


def test_a_missing_file_is_refused_by_name(data_copy):
    (data_copy / "field_notes" / "passages.jsonl").unlink()
    with pytest.raises(DataError, match="passages.jsonl"):
        field_notes.passages()


def test_reading_loads_neither_torch_nor_transformers():
    code = "import sys\nfrom labkit.datasets import field_notes\nfield_notes.passages()\n"
    code += "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# ---- labkit data ---------------------------------------------------------------------------------------------------


def labkit_data(*arguments):
    result = CliRunner().invoke(cli_data.app, list(arguments))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


@pytest.mark.parametrize("command", ["list", "check"])
def test_help_has_an_example_and_names_json(command):
    code, out = labkit_data(command, "--help")
    assert code == 0
    assert f"Example: labkit data {command}" in out
    assert "--json" in out


def test_list_says_what_how_many_whose_and_where():
    code, out = labkit_data("list")
    assert code == 0
    (line,) = [line for line in out.splitlines() if line.startswith("field-notes ")]
    assert all(word in line for word in ("168", "CC0-1.0", str(SHIPPED / "passages.jsonl")))
    code, out = labkit_data("list", "--json")
    (found,) = [data for data in json.loads(out) if data["name"] == "field-notes"]
    assert (code, found["count"], found["licence"]) == (0, 168, "CC0-1.0")
    assert found["path"] == str(SHIPPED / "passages.jsonl")
    assert found["what"]


def test_check_of_what_is_shipped_exits_with_0():
    names = [data.name for data in CATALOGUE]
    assert labkit_data("check") == (0, "".join(f"{name}: in order\n" for name in names))
    code, out = labkit_data("check", "--json")
    assert (code, json.loads(out)) == (0, [{"name": name, "ok": True, "faults": []} for name in names])


def broken(data):
    lines = (data / "passages.jsonl").read_text(encoding="utf-8").split("\n")
    lines[4] = lines[4].replace('"fn-005"', '"fn-5"')
    (data / "passages.jsonl").write_text("\n".join(lines), encoding="utf-8")


def altered(data):  # valid still, but not what the card describes
    text = (data / "passages.jsonl").read_text(encoding="utf-8")
    (data / "passages.jsonl").write_text(text.replace("fn-168", "fn-169"), encoding="utf-8")


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (broken, [r"passages.jsonl, line 5: the id is 'fn-5'", "passages.jsonl: is not the file of the card"]),
        (altered, ["passages.jsonl: is not the file of the card"]),
        (lambda data: (data / "README.md").unlink(), ["README.md: is missing"]),
        (
            lambda data: (data / "README.md").write_text("# Field Notes"),
            [f"does not list the sha256 of {f.name}" for f in sorted(SHIPPED.iterdir()) if f.name != "README.md"],
        ),
        (lambda data: (data / "more.jsonl").write_text("{}"), ["does not list the sha256 of more.jsonl"]),
        (
            lambda data: (data / "passages.jsonl").unlink(),
            ["passages.jsonl: could not be read", "lists passages.jsonl, which is not there"],
        ),
    ],
    ids=["broken", "altered", "no card", "empty card", "stray file", "no file"],
)
def test_check_of_damaged_data_exits_with_1_and_says_what_is_wrong(data_copy, damage, says, monkeypatch):
    monkeypatch.setattr("labkit.datasets.catalogue.CATALOGUE", CATALOGUE[:1])
    damage(data_copy / "field_notes")
    code, out = labkit_data("check")
    assert code == 1
    assert len(out.splitlines()) == len(says), out
    assert all(re.search(words, line) for words, line in zip(says, out.splitlines(), strict=True)), out
    code, out = labkit_data("check", "--json")
    (found,) = json.loads(out)
    assert (code, found["ok"], len(found["faults"])) == (1, False, len(says))
