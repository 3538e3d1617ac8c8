"""The command line: exit codes, one line for bad input, clean JSON, folders written whole or not at all."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import typer
from transformers import AutoModel

import labkit
from labkit import __version__, models
from labkit.cli import app
from labkit.convert import ConversionError, choose_layers
from labkit.models.registry import GEMMA_TERMS, REGISTRY

PAGE = Path(__file__).resolve().parent.parent / "docs" / "cli.md"


def all_commands(group, *names):
    """(name, ...) of all commands of the command line, without the groups."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from all_commands(command, *names, name)
        else:
            yield (*names, name)


COMMANDS = list(all_commands(typer.main.get_command(app)))


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_has_help_with_an_example_and_takes_json(labkit_command, command):
    code, out, err = labkit_command(*command, "--help")
    assert (code, err) == (0, "")
    assert f"\n\n  Example: labkit {' '.join(command)}" in out, "a paragraph of its own"
    assert "--json" in out


def test_the_page_of_the_commands_is_what_their_help_says():
    page = PAGE.read_text(encoding="utf-8")
    title = page.partition("\n")[0].removeprefix("# ")
    command = ["-m", "typer", "labkit.cli", "utils", "docs", "--name", "labkit", "--title", title]
    made = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=True, timeout=60).stdout
    assert page.strip() == made.strip(), "docs/cli.md is out of date: run make cli-docs"


def test_version_and_no_arguments_load_neither_torch_nor_transformers(labkit_command):
    assert labkit_command("--version") == (0, f"{__version__}\n", "")
    code = (
        "import sys\nfrom labkit import cli\ntry: cli.main([])\nexcept SystemExit: pass\n"
        "assert not {'torch', 'transformers', 'rich'} & set(sys.modules), 'loaded too much'"
    )
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60).stdout
    named = [line.split()[1] for line in out.splitlines() if line.startswith("  labkit ")]
    assert len(named) == 5 and set(named) <= {command[0] for command in COMMANDS}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("audit", "Missing argument 'NAME_OR_PATH'"),
        ("audit tiny-gpt2 --expect sideways", "--expect is 'sideways'; choose one of causal, bidirectional"),
        ("audit tiny-gtp2", "did you mean tiny-gpt2"),
        ("convert tiny-gpt2 --output-dir {full}", "is not empty"),
        ("convert tiny-gpt2 --output-dir {free} --window wide", "is .wide.; choose one of keep, halve, global"),
        ("convert tiny-gpt2 --output-dir {free} --window halve", "GPT2LMHeadModel has no local layers"),
        ("convert tiny-gpt2 --output-dir {free} --layers 0,7", "indices 0 to 1"),
        ("train ner --model tiny-gpt2 --output-dir {file}", "file is a file; give --output-dir a folder"),
        ("cache clear nothing", "no converted model 'nothing'"),
        ("notebooks", "Missing command"),
        ("notebooks copy {file}", "is a file"),
        ("train ner --output-dir {free} --seed -1", "seed.* -1"),
        ("audit ~nosuchuser/model", "an argument .* cannot be used: .*home directory"),
        ("convert tiny-gpt2 --output-dir {free}\0x", "an argument .* cannot be used: .*null byte"),
        ("convert tiny-gpt2 --output-dir {file}/x", "file/x could not be .*written: Not a directory"),
        ("fuse --model tiny-gpt2 --output - --resume", "no journal"),
    ],
    ids=lambda value: ascii(value),
)
def test_bad_input_exits_with_2_and_one_line_that_says_why(labkit_command, tmp_path, own_cache, line, words):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "work.txt").write_text("my work")
    (tmp_path / "file").write_text("my work")
    places = {place: str(tmp_path / place) for place in ("free", "full", "file")}
    code, out, err = labkit_command(*(word.format(**places) for word in line.split()))
    assert (code, out) == (2, ""), err
    assert len(err.splitlines()) == 1, err
    assert re.match(f"labkit: .*{words}", err), err
    assert not (tmp_path / "free").exists()
    assert (tmp_path / "full" / "work.txt").read_text() == (tmp_path / "file").read_text() == "my work"


def test_models_lists_all_of_them_as_a_table_and_as_json(labkit_command):
    _, table, _ = labkit_command("models")
    assert {line.split()[0] for line in table.splitlines()[1:]} == set(REGISTRY), "one line each when piped"
    assert json.loads(labkit_command("models", "--json")[1]) == models.available()


@pytest.mark.parametrize("profile", ["ci", "supercomputer"])
def test_the_exit_code_of_the_doctor_follows_failures(labkit_command, own_cache, monkeypatch, profile):
    monkeypatch.setenv("LABKIT_PROFILE", profile)
    code, out, _ = labkit_command("doctor", "--json")
    assert code == ("fail" in {finding["status"] for finding in json.loads(out)}) == (profile != "ci")


def test_the_cache_is_listed_repaired_and_cleared(labkit_command, small_card, own_cache, tmp_path):
    assert json.loads(labkit_command("cache", "list", "--json")[1])["entries"] == []
    labkit.load("small", device="cpu")
    (own_cache / "models" / "small" / "config.json").write_text("{}")
    assert "config.json is not the file" in labkit_command("cache", "list")[1]
    code, _, err = labkit_command("convert", "small", "--output-dir", str(tmp_path / "out"))
    (warning,) = [line for line in err.splitlines() if "warning" in line]
    assert code == 0 and warning.startswith("labkit: warning: the cached copy of small is built again: config.json")
    (entry,) = json.loads(labkit_command("cache", "list", "--json")[1])["entries"]
    assert (entry["name"], entry["problem"]) == ("small", None)
    (gone,) = json.loads(labkit_command("cache", "clear", "small", "--json")[1])["deleted"]
    assert gone == entry
    assert json.loads(labkit_command("cache", "list", "--json")[1])["entries"] == []


def test_audit_exits_1_when_the_expectation_fails(labkit_command):
    assert labkit_command("audit", "tiny-gemma3", "--quick", "--expect", "causal")[0] == 0
    code, out, err = labkit_command("audit", "tiny-gemma3", "--quick", "--expect", "bidirectional", "--json")
    assert code == 1 and json.loads(out)["verdict"] == "causal"
    assert err == "labkit: tiny-gemma3 was expected to be bidirectional and is causal\n"


# ---- convert ---------------------------------------------------------------------------------------------------------


def test_a_converted_folder_attends_both_ways_in_plain_transformers_as_far_as_declared(labkit_command, tmp_path):
    """Change one token at a time and look at the middle: by hand, without labkit, padded and unpadded."""
    assert labkit_command("convert", "tiny-gemma3", "--output-dir", tmp_path / "encoder")[0] == 0
    model, n, middle = AutoModel.from_pretrained(tmp_path / "encoder").eval(), 40, 20
    ids = torch.randint(3, 200, (1, n), generator=torch.Generator().manual_seed(0)).repeat(n + 1, 1)
    ids[range(n), range(n)] += 1  # row i differs from the last row in token i
    for mask in (torch.ones_like(ids), torch.ones_like(ids).index_fill(1, torch.tensor([38, 39]), 0)):
        with torch.no_grad():
            states = model(ids, attention_mask=mask, output_hidden_states=True).hidden_states
        local, everything = ((layer[:-1] - layer[-1])[:, middle].abs().amax(-1) > 1e-4 for layer in states[1:])
        assert [i - middle for i in range(n) if local[i]] == list(range(-7, 8)), "a window of 8 tokens on either side"
        assert torch.equal(everything, mask[0, :n] == 1)


def test_a_converted_folder_keeps_its_layers_and_licence_files_and_no_path(labkit_command, tiny, tmp_path):
    source, out = tmp_path / "secret place" / "my-model", tmp_path / "out"
    tiny("tiny-gemma3").model.save_pretrained(source)
    (source / "README.md").write_text("---\nlicense: cc-by-4.0\n---\n")
    (source / "LICENSE").write_text("the text")
    code, text, _ = labkit_command("convert", source, "--output-dir", out, "--layers", "1", "--json")
    assert code == 0
    assert json.loads(text)["layers"] == [1] and json.loads(text)["plain_transformers"] is False
    assert not [file for file in out.iterdir() if b"secret place" in file.read_bytes()]
    card = (out / "README.md").read_text()
    assert "# my-model, made bidirectional" in card and "**without labkit this model may be causal**" in card
    assert (out / "LICENSE").read_text() == "the text"
    loaded = labkit.load(out, device="cpu")
    expected = labkit.to_bidirectional(tiny("tiny-gemma3").model, layers=[1])
    ids = torch.arange(3, 33).unsqueeze(0)
    with torch.no_grad():
        assert torch.equal(loaded.model(ids).logits, expected(ids).logits)
    assert loaded.licence == "cc-by-4.0"


def test_a_converted_gemma_comes_with_its_terms_and_its_notice(
    labkit_command, small_card, small_gguf, tmp_path, monkeypatch
):
    (small_gguf[0] / "TERMS.html").write_text("the terms")
    package = replace(small_card.origin, terms=("small_gguf", "TERMS.html"))
    monkeypatch.setitem(REGISTRY, "small", replace(small_card, licence=GEMMA_TERMS, origin=package))
    assert labkit_command("convert", "small", "--output-dir", tmp_path / "out")[0] == 0
    assert (tmp_path / "out" / "TERMS.html").read_text() == "the terms"
    notice = (tmp_path / "out" / "NOTICE.txt").read_text()
    assert "subject to the Gemma Terms of Use found at ai.google.dev/gemma/terms" in notice
    assert str(small_gguf[0]) not in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize(
    ("choice", "layers"),
    [
        ("all", None), ("middle-third", [2, 3]), ("3,1", [1, 3]), ("below-1/3", [0, 1]), ("above-2/3", [2, 3, 4, 5]),
        ("above-3/3", None), ("last", "refused"), ("above-0/3", "refused"), ("above-1/0", "refused"),
        ("0,7", "refused"), ("-1", "refused"),
    ],
)  # fmt: skip
def test_layers_are_chosen_by_name_or_number(choice, layers):
    with pytest.raises(ConversionError, match="layers") if layers == "refused" else nullcontext():
        assert choose_layers(choice, 6) == layers


# ---- how a command ends ----------------------------------------------------------------------------------------------


def test_a_full_disk_is_one_line_and_leaves_nothing_half_written(labkit_command, tmp_path, full_disk):
    with full_disk(after=10_000):
        code, _, err = labkit_command("convert", "tiny-gpt2", "--output-dir", tmp_path / "new")
    assert (code, len(err.splitlines())) == (2, 1), err
    assert str(tmp_path / "new") in err and "could not be" in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("shown", [False, True])
def test_a_fault_of_labkit_exits_with_70_and_says_how_to_see_where(labkit_command, monkeypatch, shown):
    def broken():
        raise LookupError("a fault")

    monkeypatch.setattr(models, "available", broken)
    monkeypatch.setenv("LABKIT_TRACEBACK", "1" if shown else "")
    code, out, err = labkit_command("models")
    assert (code, out) == (70, "")
    assert err.splitlines()[-1].startswith("labkit: LookupError in `labkit models`: a fault. This is a fault of labkit")
    assert ("in broken" in err) == shown and (len(err.splitlines()) > 1) == shown


@pytest.mark.skipif(os.name != "posix", reason="a closed pipe is another error elsewhere")
@pytest.mark.parametrize("line", ["models", "models --json", "train ner --help"])
def test_a_reader_that_has_gone_ends_a_command_quietly(line):
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "labkit", *line.split()]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")
