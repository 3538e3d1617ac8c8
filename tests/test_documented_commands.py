"""Every command that README, guides and cards show is run, in the order of its page, or declared not to be.

`documented_commands.toml` says for each page what is run as it stands, what is run at a smaller size, and what is not
run here and why. A command that stands in none of these fails, and so does an entry that matches no command. Run or
not, each must be one that labkit's command line, the Makefile or the repository knows, with all its options.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import typer

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    "README.md", "CONTRIBUTING.md", "docs/*.md", "docs/site/**/*.md", "benchmarks/README.md", "notebooks/README.md",
    "data/**/README.md", "deploy/**/README.md",
]  # fmt: skip
PROGRAMS = {
    "accelerate", "apt-get", "bash", "cd", "conda", "cp", "curl", "docker", "export", "for", "git", "helm", "hf",
    "jupyter", "kubectl", "labkit", "make", "mkdir", "mv", "nbgrader", "pip", "printf", "pytest", "python", "python3",
    "rm", "ruff", "sh", "source", "sudo", "torchrun", "uv", "voila",
}  # fmt: skip
UsageError: Any = typer.BadParameter.__base__  # click's, or the one in typer's own copy of click
PYTHON, SHELL, YAML = ({"python", "py"}, {"sh", "bash", "shell", "console"}, {"yaml", "yml"})
FENCE = re.compile(r"^( *)(`{3,})([^\n`]*)\n(.*?)^\1\2 *$", re.M | re.S)
INDENTED = re.compile(r"(?:(?<=\n\n)|\A)()()()((?: {4}\S.*\n|\n(?= {4}))+)")  # with the groups of FENCE
SPAN = re.compile(r"(?<!`)`([^`]+)`(?!`)")
STARTED_AS = re.compile(r"^(?:!|(?:[A-Z_]+=\S+ )+)?(?:\.venv[/\\](?:bin|Scripts)[/\\])?")  # `X=1 .venv/bin/labkit`


# ---- what a page shows ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Command:
    """A shell command of a block ("shell") or of a sentence ("sentence"), or a block of Python ("python")."""

    page: str
    line: int
    kind: str
    text: str

    @property
    def key(self) -> str:
        """Its first line with single spaces: its name in the ledger."""
        return " ".join(self.text.splitlines()[0].split())

    def __str__(self) -> str:
        return f"{self.page}, line {self.line}: {self.key}"


def commands_of(page: str, text: str) -> list[Command]:
    """All commands of a page, in their order."""
    found: list[Command] = []

    def taken(block: re.Match) -> str:
        first = text.count("\n", 0, block.start(4)) + 1
        found.extend(_of_block(page, first, block[3].strip(), textwrap.dedent(block[4])))
        return re.sub(r"[^\n]", " ", block[0])

    prose = INDENTED.sub(taken, FENCE.sub(taken, text))
    for span in SPAN.finditer(prose):
        said, line = " ".join(span[1].split()), prose.count("\n", 0, span.start()) + 1
        program = STARTED_AS.sub("", said).split(" ")[0]
        if said.startswith("scripts/") or (program in PROGRAMS and said != program):
            found.append(Command(page, line, "sentence", said))
    return sorted(found, key=lambda command: command.line)


def options_of(text: str) -> set[str]:
    """The options that sentences name without their command, such as `--folds 5`."""
    spans = (span[1] for span in SPAN.finditer(FENCE.sub("", text)))
    return {word for said in spans if said.startswith("--") for word in said.split() if word.startswith("--")}


def _of_block(page: str, first: int, label: str, block: str) -> Iterator[Command]:
    if label in PYTHON or (label in ("", "text") and re.match(r"from \w|import \w", block)):
        yield Command(page, first, "python", block.rstrip())
    elif label in YAML:
        for number, line in enumerate(block.splitlines()):
            if step := re.match(r"\s*- run: (.+)", line):
                yield Command(page, first + number, "shell", _without_comment(step[1]))
    elif label in SHELL or label in ("", "text"):
        lines = list(_shell_lines(block, prompt="$ " if label == "console" else ""))
        if label in SHELL or any(_is_command(line) for _, line in lines):
            yield from (Command(page, first + number, "shell", line) for number, line in lines)


def _shell_lines(block: str, prompt: str) -> Iterator[tuple[int, str]]:
    """(place, command) without comments; a continued line is one command, and so is a loop."""
    begun, whole = 0, ""
    for number, line in enumerate(block.splitlines()):
        if not whole:
            if not line.startswith(prompt):
                continue  # of a console: what was printed
            begun, line = number, line.removeprefix(prompt)
        whole += _without_comment(line)
        if whole.endswith("\\"):
            whole = whole[:-1].rstrip() + " "
        elif whole.startswith("for ") and whole.split("\n")[-1] != "done":
            whole += "\n"
        else:
            if whole.strip():
                yield begun, whole.strip()
            whole = ""


def _without_comment(line: str) -> str:
    return re.sub(r"(?:^|\s+)#(?:\s.*)?$", "", line).rstrip()


def _is_command(line: str) -> bool:
    """Whether a line of a block without a language is one; `labkit 0.1.0, profile ci` is what labkit prints."""
    program, _, rest = STARTED_AS.sub("", line).partition(" ")
    return program in PROGRAMS and not re.match(r"\d", rest)


def pages() -> dict[str, str]:
    """{path: text} of all pages but docs/cli.md, which is generated from the commands themselves."""
    files = sorted({file for pattern in PAGES for file in ROOT.glob(pattern)} - {ROOT / "docs" / "cli.md"})
    return {file.relative_to(ROOT).as_posix(): file.read_text(encoding="utf-8") for file in files}


# ---- whether it would be understood ----------------------------------------------------------------------------------


def complaint(command: Command) -> str | None:
    """What labkit's command line, the Makefile or the repository does not know of a command; None if nothing."""
    words = labkit_words(command.text)
    found = misunderstood(words, command.kind == "shell") if words is not None else missing(command.text)
    return f"{command}\n  {found}" if found else None


def labkit_words(text: str) -> list[str] | None:
    """The arguments of the labkit command in a line, however it is started; None if there is none."""
    text = STARTED_AS.sub("", text)
    if not re.match(r"labkit |.* -m labkit ", text):
        return None
    words = shlex.split(text)
    starts = [0] if words[0] == "labkit" else [at + 1 for at, pair in enumerate(pairwise(words)) if pair[1] == "labkit"]
    return words[starts[0] + 1 :]


def misunderstood(words: list[str], whole: bool) -> str | None:
    """What is wrong with these arguments. In a sentence a bare name is a mention, and "..." stands for the rest."""
    try:
        context, rest = resolved(words)
        if hasattr(context.command, "commands"):
            return None
        if whole or (rest and "..." not in rest):
            context.command.make_context(context.info_name, list(rest), parent=context.parent)
        else:
            context.command.make_parser(context).parse_args(args=[word for word in rest if word != "..."])
    except UsageError as error:
        return f"{error.ctx.command_path}: {error.format_message()}" if error.ctx else error.format_message()
    return None


def resolved(words: list[str]) -> tuple[Any, list[str]]:
    """The context of the command that these words name, and the words that are left; a name in capitals is none."""
    command = labkit()
    context = command.context_class(command, info_name="labkit")
    while words and not words[0].isupper() and hasattr(context.command, "commands"):
        if words[0] not in context.command.commands:
            raise UsageError(f"{context.command_path} has no command {words[0]!r}")
        command = context.command.commands[words[0]]
        context, words = command.context_class(command, info_name=words[0], parent=context), words[1:]
    return context, words


def missing(text: str) -> str | None:
    """Which target, variable, file, module, option or extra of a command that is not labkit's does not exist."""
    program, *words = STARTED_AS.sub("", text).replace("\\", "/").split()
    files = [after for before, after in pairwise(words) if before in ("-c", "-f", "--values") and after[0] not in "\"'"]
    named = (word.partition("::")[0] for word in [program, *words])
    files += [word for word in named if re.match(r"(benchmarks|deploy|notebooks|scripts|tests)/\S+\.\w+$", word)]
    absent = [f"there is no file {file}" for file in files if not (ROOT / file).exists()]
    if program == "make":
        makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
        known = re.findall(r"^([a-z0-9-]+):|^([A-Z_]+) \?=", makefile, re.M)
        names = {name for pair in known for name in pair}
        absent += [f"the Makefile has no {word}" for word in words if word.partition("=")[0] not in names]
    elif program in ("python", "python3") and words[:1] == ["-m"]:
        absent += [] if importlib.util.find_spec(words[1]) else [f"there is no module {words[1]}"]
    elif program in ("python", "python3") and not absent and words[0].endswith(".py"):
        source = (ROOT / words[0]).read_text(encoding="utf-8")
        absent += [f"{words[0]} has no option {w}" for w in words if w.startswith("--") and f'"{w}"' not in source]
    elif "pip install" in text:
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
            "optional-dependencies"
        ]
        named = {extra for group in re.findall(r"\[([a-z,]+)\]", text) for extra in group.split(",")}
        absent += [f"there is no extra {extra}" for extra in sorted(named - set(extras))]
    return "; ".join(absent) or None


@cache
def labkit() -> Any:
    """The command line as click has it: a group of commands, each with its options."""
    from labkit.cli import app

    return typer.main.get_command(app)


def known_options() -> set[str]:
    """All options of labkit's commands, and those of benchmarks and scripts."""
    options, groups = {"--help"}, [labkit()]
    for command in groups:
        groups += getattr(command, "commands", {}).values()
        options |= {option for parameter in command.params for option in parameter.opts}
    for program in [*ROOT.glob("benchmarks/*.py"), *ROOT.glob("scripts/*.py")]:
        options |= set(re.findall(r'add_argument\(\s*"(--[\w-]+)"', program.read_text(encoding="utf-8")))
    return options


# ---- the ledger ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """What is done with a command; see the head of documented_commands.toml."""

    why: str = ""  # it is not run; empty: it is run
    put: dict[str, str] = field(default_factory=dict)
    add: str = ""
    given: str = ""
    then: str = ""
    exit: int = 0
    prints: str = ""

    def applied(self, text: str) -> str:
        for old, new in self.put.items():
            edge = [r"(?<!\w)" if old[0].isalnum() else "", r"(?!\w)" if old[-1].isalnum() else ""]
            text, times = re.subn(edge[0] + re.escape(old) + edge[1], lambda _, new=new: new, text)
            assert times, f"the ledger puts something in place of {old!r}, which does not stand in: {text}"
        return f"{text} {self.add}".rstrip()


def plans(table: dict) -> list[tuple[str, Plan]]:
    """(key of a command, what is done with it) of one page."""
    listed = [(line, Plan()) for line in table.get("as_written", [])]
    listed += [(run["line"], Plan(**{k: v for k, v in run.items() if k != "line"})) for run in table.get("run", [])]
    return listed + [(line, Plan(why=each["why"])) for each in table.get("not_run", []) for line in each["lines"]]


def needs_a_plan(command: Command) -> bool:
    """All of a block; of sentences the commands of labkit with arguments, as a name alone is only a mention."""
    if command.kind != "sentence":
        return True
    words = labkit_words(command.text)
    if words is None or "..." in words:
        return False
    if misunderstood(words, whole=False):
        return True
    context, rest = resolved(words)
    return bool(rest) and not hasattr(context.command, "commands")


def disagreements(found: list[Command], table: dict) -> list[str]:
    """Commands that the ledger does not list, and what it lists that is no command, in words."""
    listed, keys = [key for key, _ in plans(table)], {command.key for command in found}
    said = [
        f"{command}\n  neither run nor declared: list it in {LEDGER.name}, under as_written, run or not_run"
        for command in found
        if needs_a_plan(command) and command.key not in listed
    ]
    said += [f"{LEDGER.name} lists a command that stands there no more: {key}" for key in listed if key not in keys]
    said += [f"{LEDGER.name} lists twice: {key}" for key in sorted({key for key in listed if listed.count(key) > 1})]
    return said + [
        f"{LEDGER.name} gives no reason: {each['lines']}" for each in table.get("not_run", []) if not each["why"]
    ]


LEDGER = Path(__file__).with_name("documented_commands.toml")
TABLES = tomllib.loads(LEDGER.read_text(encoding="utf-8"))
OTHERS = TABLES.pop("options of other programs")
TEXTS = pages()
COMMANDS = {page: commands_of(page, text) for page, text in TEXTS.items()}
CHECKED = sorted(
    {(page, each.key): each for page in COMMANDS for each in COMMANDS[page] if each.kind != "python"}.items()
)
TO_RUN = sorted(page for page, table in TABLES.items() if any(not plan.why for _, plan in plans(table)))


@pytest.mark.parametrize("page", sorted(page for page in COMMANDS if COMMANDS[page] or page in TABLES))
def test_every_command_of_a_page_is_run_or_declared(page):
    found = disagreements(COMMANDS[page], TABLES.get(page, {}))
    assert not found, "\n" + "\n".join(found)


def test_the_ledger_names_pages_that_are_there():
    assert set(TABLES) <= set(COMMANDS)


@pytest.mark.parametrize("command", [each for _, each in CHECKED], ids=[f"{page}: {key}" for (page, key), _ in CHECKED])
def test_a_documented_command_is_one_that_exists_with_all_its_options(command):
    assert complaint(command) is None, complaint(command)


def test_options_that_sentences_name_exist():
    named = {option for text in TEXTS.values() for option in options_of(text)}
    assert named - known_options() == set(OTHERS), "an option of another program belongs in the ledger"


# ---- running ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def page_folder(tmp_path, monkeypatch, no_network):
    """An empty working directory, where `labkit` and `python` are those of these tests, and no record is anybody's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]))
    monkeypatch.setenv("PATH", os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
    monkeypatch.setenv("LABKIT_PROGRESS", str(tmp_path / ".progress"))  # a page shows how to clear it
    with patch.dict(os.environ):
        yield tmp_path


@pytest.fixture
def executed(page_folder, labkit_command, capfd):
    """executed(text) -> (exit code, what it printed) of one line of a shell; executed.python(text) of Python."""
    space: dict = {"__name__": "page"}

    def shell(text: str) -> tuple[int, str]:
        if (words := labkit_words(text)) is not None:
            code, out, err = labkit_command(*words)
            return code, out + err
        if text.startswith("cd "):
            os.chdir(text.removeprefix("cd "))
            return 0, ""
        own = os.environ | {"HOME": str(page_folder)}
        done = subprocess.run(["bash", "-ec", text], capture_output=True, text=True, timeout=240, env=own)
        return done.returncode, done.stdout + done.stderr

    def python(text: str) -> tuple[int, str]:
        capfd.readouterr()
        exec(compile(text, "page", "exec"), space)
        return 0, "".join(capfd.readouterr())

    shell.python = python
    return shell


@pytest.mark.end_to_end
@pytest.mark.timeout(900)
@pytest.mark.skipif(shutil.which("bash") is None, reason="the commands are those of a POSIX shell")
@pytest.mark.parametrize("page", TO_RUN)
def test_the_commands_of_a_page_run(page, page_folder, executed):
    make_files(page_folder, TABLES[page])
    for line in TABLES[page].get("before", []):
        assert executed(line)[0] == 0, line
    run_in_order(COMMANDS[page], TABLES[page], executed)


def run_in_order(commands: list[Command], table: dict, executed: Any) -> None:
    """Run what is to be run of these; AssertionError, with what was printed, where the outcome is another."""
    planned, done = dict(plans(table)), set()
    for command in commands:
        plan = planned.get(command.key)
        if plan is None or plan.why or (command.kind == "sentence" and command.key in done):
            continue
        done.add(command.key)
        run = executed.python if command.kind == "python" else executed
        lines = (lambda text: [text]) if command.kind == "python" else str.splitlines
        try:
            given = [run(each) for each in lines(plan.given)]
            code, said = run(plan.applied(command.text))
            then = [run(each) for each in lines(plan.then)]
        except (Exception, SystemExit) as error:
            raise AssertionError(f"{command}: {type(error).__name__}: {error}") from error
        assert code == plan.exit, f"{command}: exit code {code} instead of {plan.exit}\n{said[-4000:]}"
        assert plan.prints in said, f"{command} did not print {plan.prints!r}\n{said[-4000:]}"
        assert not any(failed for failed, _ in given + then), f"{command}: given {given}, then {then}"


def make_files(folder: Path, table: dict) -> None:
    """What a page presupposes: copies of the repository's files, and files with the text of the ledger."""
    for name, source in table.get("copy", {}).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / source, folder / name)
    for name, text in table.get("write", {}).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")


@pytest.mark.gemma
@pytest.mark.end_to_end
def test_the_readme_shows_what_the_audit_prints(executed):
    from labkit.errors import MissingPackageError

    (block,) = (command.text for command in COMMANDS["README.md"] if command.kind == "python")
    shown = next(found[4] for found in FENCE.finditer(TEXTS["README.md"]) if found[3] == "text")
    load, audited, rest = block.partition("labkit.to_bidirectional")
    try:
        executed.python(load)  # says so where the model is converted for the first time
    except MissingPackageError as error:
        pytest.skip(str(error))
    assert executed.python(audited + rest) == (0, shown)


# ---- controls: what must fail, fails -------------------------------------------------------------------------------

EVERY_FORM = """
# A page

```sh
labkit doctor       # is this environment all right?
labkit audit MODEL \\
    --expect bidirectional
for file in *.ipynb; do
    echo "$file"
done
```

- In a list:

  ```python
  import labkit
  ```

```text
labkit 0.1.0, profile ci
```

```text
# as root
sudo reboot
```

```console
$ make lab
labkit: opening JupyterLab
```

```yaml
      - run: labkit models   # a list
```

    from labkit import masks
    masks.causal()

It is `make test`, `!labkit data list`, `labkit`, `labkit.load`, `torchrun -m
labkit train ner ...` and `--folds 5`.
"""


def test_commands_are_found_in_every_form_and_nothing_else_is():
    assert [(each.line, each.kind, each.text) for each in commands_of("page.md", EVERY_FORM)] == [
        (5, "shell", "labkit doctor"),
        (6, "shell", "labkit audit MODEL     --expect bidirectional"),
        (8, "shell", 'for file in *.ipynb; do\n    echo "$file"\ndone'),
        (16, "python", "import labkit"),
        (25, "shell", "sudo reboot"),
        (29, "shell", "make lab"),
        (34, "shell", "labkit models"),
        (37, "python", "from labkit import masks\nmasks.causal()"),
        (40, "sentence", "make test"),
        (40, "sentence", "!labkit data list"),
        (40, "sentence", "torchrun -m labkit train ner ..."),
    ]
    assert options_of(EVERY_FORM) == {"--folds"}


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        ("shell", "labkit audit tiny-gpt2 --expectation causal", "--expectation"),
        ("shell", "labkit auditt tiny-gpt2", "labkit has no command 'auditt'"),
        ("shell", "labkit bench future-attention --seeds 0", "--output-dir"),
        ("shell", "labkit train qa --output-dir runs/qa --max-steps few", "few"),
        ("sentence", "labkit train qa --folds 5", "--output-dir"),
        ("sentence", "labkit train ner --frobnicate ...", "--frobnicate"),
        ("sentence", "torchrun -m labkit train ner --frobnicate ...", "--frobnicate"),
        ("sentence", "labkit bench nothing", "labkit bench has no command 'nothing'"),
        ("sentence", "make coffee", "the Makefile has no coffee"),
        ("sentence", "make lab COFFEE=1", "the Makefile has no COFFEE"),
        ("sentence", "python benchmarks/load.py --frobnicate", "has no option --frobnicate"),
        ("sentence", "pytest tests/test_nothing.py::test_it", "there is no file tests/test_nothing.py"),
        ("sentence", "python benchmarks/nothing.py", "there is no file benchmarks/nothing.py"),
        ("sentence", ".venv/bin/python -m no_such_module", "there is no module no_such_module"),
        ("shell", 'pip install -c constraints.txt -e ".[all,frob]"', "there is no extra frob"),
        ("shell", "docker build -f deploy/nothing/Dockerfile .", "there is no file deploy/nothing/Dockerfile"),
    ],
)
def test_a_command_that_does_not_exist_is_named(kind, text, words):
    assert words in complaint(Command("page.md", 1, kind, text))


def test_a_mention_and_a_placeholder_are_no_faults():
    for said in (
        "labkit bench report",
        "labkit train",
        "labkit train NAME",
        "labkit fuse",
        "make lab PYTHON=python3.12",
    ):
        assert complaint(Command("page.md", 1, "sentence", said)) is None


def test_a_command_without_an_entry_and_an_entry_without_a_command_are_named():
    found = commands_of("page.md", "```sh\nlabkit doctor\nlabkit models\n```\nOr `labkit leakage MODEL`.\n")
    table = {"as_written": ["labkit doctor", "labkit gone"], "not_run": [{"lines": ["labkit models"], "why": ""}]}
    said = "\n".join(disagreements(found, table))
    assert said.count("neither run nor declared") == 1 and "page.md, line 5: labkit leakage MODEL" in said
    assert "stands there no more: labkit gone" in said and "gives no reason: ['labkit models']" in said
    whole = {"as_written": ["labkit doctor", "labkit models", "labkit leakage MODEL"]}
    assert disagreements(found, whole) == []
    assert "lists twice: labkit doctor" in disagreements(found, {**whole, "run": [{"line": "labkit doctor"}]})[0]


def test_what_is_put_must_take_the_place_of_something():
    assert Plan(put={"T": "a text"}, add="--json").applied("labkit T TEXTS") == "labkit a text TEXTS --json"
    with pytest.raises(AssertionError, match="'DIR', which does not stand in"):
        Plan(put={"DIR": "runs"}).applied("labkit DIRECTORY")


@pytest.mark.parametrize(
    ("text", "run", "words"),
    [
        ("labkit no-such-command", {}, "exit code 2 instead of 0"),
        ("labkit data check --task qa", {"exit": 1}, "exit code 2 instead of 1"),
        ("false", {}, "exit code 1 instead of 0"),
        ("echo one", {"prints": "two"}, "did not print 'two'"),
        ("echo one", {"given": "true\nfalse"}, "given"),
        ("echo one", {"then": "test -e three"}, "then"),
        ("echo one", {"put": {"two": "three"}}, "does not stand in: echo one"),
    ],
)
def test_an_outcome_that_was_not_expected_is_named(executed, text, run, words):
    command = Command("page.md", 1, "shell", text)
    with pytest.raises(AssertionError, match=words):
        run_in_order([command], {"run": [{"line": text, **run}]}, executed)


def test_python_that_raises_is_named_and_blocks_of_a_page_share_their_names(executed):
    page = commands_of("page.md", "```python\na = 1\n```\n\n```python\nprint(a)\n```\n\n```python\nb\n```\n")
    table = {"as_written": ["a = 1"], "run": [{"line": "print(a)", "prints": "1\n"}]}
    run_in_order(page, table, executed)
    with pytest.raises(AssertionError, match="page.md, line 10: b: NameError: name 'b' is not defined"):
        run_in_order(page, {**table, "as_written": ["a = 1", "b"]}, executed)
