"""README, guides and cards: commands, files and links exist, and the Python blocks do what the page shows."""

import re
import shlex
import textwrap
from pathlib import Path

import pytest
import typer

from labkit.cli import app
from labkit.errors import ModelError

ROOT = Path(__file__).resolve().parent.parent
PATTERNS = ("*.md", "docs/*.md", "benchmarks/README.md", "notebooks/README.md", "data/**/README.md")
FILES = {file for pattern in PATTERNS for file in ROOT.glob(pattern)} - {ROOT / "CHANGELOG.md", ROOT / "docs/cli.md"}
PAGES = sorted(file.relative_to(ROOT).as_posix() for file in FILES)
TARGETS = re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^ *```$", re.M | re.S)
SPAN = re.compile(r"(?<!`)`([^`]+)`(?!`)")
FOLDERS = r"(?:benchmarks|data|deploy|docs|labkit|notebooks|scripts|tests)/[\w./-]+\.\w+"
LABKIT = typer.main.get_command(app)
UsageError = typer.BadParameter.__base__  # of click, or of the copy of click in typer


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page: str, *languages: str) -> list[str]:
    return [textwrap.dedent(body) for _, language, body in FENCE.findall(text_of(page)) if language in languages]


def shell_lines(page: str) -> list[str]:
    """The commands of the shell blocks, without comments and with continued lines joined."""
    lines = re.sub(r" *\\\n *", " ", "\n".join(blocks(page, "", "sh", "bash"))).splitlines()
    return [re.sub(r"(^|\s+)#\s.*", "", line) for line in lines]


def spans(page: str) -> list[str]:
    """The code in the sentences of a page, such as `labkit data check`."""
    return [" ".join(span.split()) for span in SPAN.findall(FENCE.sub("", text_of(page)))]


def parse(words: list[str], is_whole: bool) -> None:
    """Let labkit's command line read a command; UsageError if there is no such command or option.

    A command in a sentence may leave out arguments, and options that are required.
    """
    command, rest = LABKIT, list(words)
    while hasattr(command, "commands") and (is_whole or (rest and not rest[0].isupper())):
        if not rest or rest[0] not in command.commands:
            raise UsageError(f"no such command: labkit {' '.join(words)}")
        command = command.commands[rest.pop(0)]
    if is_whole:
        command.make_context("labkit", rest)
    elif not hasattr(command, "commands"):
        context = command.context_class(command, info_name="labkit")
        command.make_parser(context).parse_args(args=[word for word in rest if word != "..."])


def labkit_words(line: str) -> list[str] | None:
    """The arguments of labkit in a line such as `X=1 .venv/bin/labkit doctor` or `torchrun -m labkit train qa`."""
    match = re.match(r"!?(?:[A-Z_]+=\S+ )*(?:\S*/)?labkit (?![\d.])(.+)|.+ -m labkit (.+)", line)
    return shlex.split(match[1] or match[2]) if match else None


@pytest.mark.parametrize("page", PAGES)
def test_commands_exist_with_all_their_options(page):
    whole_lines = shell_lines(page)
    for line in whole_lines + spans(page):
        if words := labkit_words(line):
            try:
                parse(words, is_whole=line in whole_lines)
            except UsageError as error:
                pytest.fail(f"{page}: {line}\n{error.format_message()}")
        if target := re.match(r"make ([a-z][a-z0-9-]*)", line):
            assert target[1] in TARGETS, f"{page}: {line}"


def anchors(page: Path) -> set[str]:
    """What GitHub calls the headings of a Markdown page."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text(encoding="utf-8")), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files_and_headings_that_exist(page):
    for target, fragment in re.findall(r"\]\((?!\w+:)([^)#\s]*)(?:#([^)\s]*))?\)", text_of(page)):
        file = ROOT / page if not target else (ROOT / page).parent / target
        assert file.exists(), f"{page}: {target}"
        if fragment and file.suffix == ".md":
            assert fragment in anchors(file), f"{page}: {target}#{fragment}"
    for line in shell_lines(page) + spans(page):
        for file in re.findall(rf"(?:^|(?<= )){FOLDERS}(?=$|[ :])", line):
            assert (ROOT / file).exists() or re.search("N[N_.]", file), f"{page}: {line}"


@pytest.mark.gemma
@pytest.mark.end_to_end
@pytest.mark.timeout(900)
def test_the_readme_shows_what_its_code_prints(capfd, monkeypatch):
    monkeypatch.setattr("labkit.assert_bidirectional", lambda model: model)  # it would measure the same once more
    load, convert, rest = blocks("README.md", "python")[0].partition("labkit.to_bidirectional")
    names = {}
    try:
        exec(load, names)  # a first conversion of the weights prints their licence
    except ModelError as error:
        if error.kind != "not installed":
            raise
        pytest.skip(str(error))
    capfd.readouterr()
    exec(convert + rest, names)
    assert capfd.readouterr().out == blocks("README.md", "text")[0]


@pytest.mark.end_to_end
def test_the_python_of_the_engineers_page_runs_with_tiny_models(tmp_path, monkeypatch, capfd):
    import labkit
    from labkit.gpt import GPT, GPTConfig

    monkeypatch.chdir(tmp_path)
    names = {name: labkit.load("tiny-gemma3").model for name in ("model", "original", "converted")}
    names |= {"prompt": names["model"].dummy_inputs["input_ids"][:1], "load_our_model": lambda: names["converted"]}
    names["factory"] = lambda seed: GPT(GPTConfig(vocab_size=64, context=32, width=16, layers=1, heads=2))
    labkit.to_bidirectional(names["converted"])
    first, *others = blocks("docs/engineers.md", "python")
    capfd.readouterr()
    exec(first, names)
    assert capfd.readouterr().out == blocks("docs/engineers.md", "text")[0]
    for block in others:
        exec(block.replace("layers[3]", "layers[1]").replace("factory, 64", "factory, 64, steps=2"), names)
    names["test_our_encoder_is_bidirectional"]()
