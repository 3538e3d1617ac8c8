"""The scripts of benchmarks/study as commands: they run, report, and refuse invalid input with one line."""

import pandas as pd
import pytest

from benchmarks.study import fusion, future, mask_effect

pytestmark = pytest.mark.end_to_end


@pytest.fixture
def run(monkeypatch, capsys):
    def command(script, *arguments):
        """The exit code, standard output and standard error."""
        monkeypatch.setattr("sys.argv", [script.__file__, *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            script.main()
        return ended.value.code, *capsys.readouterr()

    return command


@pytest.mark.parametrize(
    ("script", "arguments", "conditions"),
    [
        (
            mask_effect,
            "--model tiny-gpt2 --data ner:which-way-round --arms causal,unmask:0 --learning-rates 1e-3 --seeds 0,1 "
            "--max-steps 2 --max-train 12 --max-eval 12",
            ["which-way-round/ner"],
        ),
        (
            fusion,
            "--model tiny-llama --methods fuse --num-paraphrases 1,2 --few-shot 1 --max-questions 8 --repeat-control "
            "--lemmatizer simplemma --lemmatised",
            ["known-facts", "known-facts, copies"],
        ),
        (
            future,
            "--arms baseline,future:kl:5 --seeds 0,1 --steps 4 --batch-size 4 --context 16 --width 16 --layers 1 "
            "--heads 2 --vocab-size 300",
            ["study"],
        ),
    ],
)
def test_a_study_runs_and_reports(run, script, arguments, conditions, tmp_path):
    folder = tmp_path / "study"
    code, table, log = run(script, *arguments.split(), "--output-dir", folder)
    assert code == 0, log
    rows = pd.read_csv(folder / "report.csv")
    assert list(rows["condition"].unique()) == conditions and rows["mean"].notna().all()
    assert (folder / "report.md").read_text() == table and len(table.splitlines()) == len(rows) + 2
    assert run(script, "--report-only", "--output-dir", folder) == (0, table, "")
    code, _, message = run(script, *arguments.split(), "--batch-size", "3", "--output-dir", folder)
    assert code == 2 and len(message.splitlines()) == 1 and "now" in message
