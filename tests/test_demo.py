"""`labkit demo`: one page, served from this machine to this machine, until Ctrl-C."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

pytest.importorskip("voila")

from labkit import demo  # noqa: E402
from labkit.errors import LabkitError  # noqa: E402

pytestmark = pytest.mark.end_to_end

COMMAND = [sys.executable, "-m", "labkit", "demo", "--no-browser", "--model", "tiny-gpt2"]

ROOT = Path(__file__).resolve().parent.parent
ELSEWHERE = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}


@pytest.fixture
def taken():
    """A port of this machine that somebody else listens on."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        yield other.getsockname()[1]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


@pytest.mark.timeout(400)
def test_check_fetches_the_page_once_and_ends(tmp_path):
    # a config file where labkit is started has no say
    (tmp_path / "voila.json").write_text('{"VoilaConfiguration": {"template": "no-such-template"}}')
    command = [*COMMAND, "--check", "--json"]
    done = subprocess.run(command, cwd=tmp_path, env=ELSEWHERE, capture_output=True, text=True, timeout=360)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["model"] == "tiny-gpt2" and said["checked"] is True
    assert said["address"].startswith("http://127.0.0.1:")


@pytest.mark.timeout(400)
def test_ctrl_c_ends_it_without_a_traceback():
    port = free_port()
    server = subprocess.Popen(
        [*COMMAND, "--port", str(port)],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # a background shell ignores it
    )
    try:
        said = server.stderr.readline()
        assert f"http://127.0.0.1:{port}/" in said
        server.send_signal(signal.SIGINT)
        out, err = server.communicate(timeout=60)
    finally:
        server.kill()
    assert (server.returncode, out, err) == (0, "", "")


def test_port_that_was_asked_for_and_is_taken_is_refused(taken):
    with pytest.raises(LabkitError, match=f"port {taken} of 127.0.0.1 cannot be used: .*--port"):
        demo.serve(port=taken)


def test_without_a_wish_the_next_free_port_is_taken_and_named(taken, monkeypatch, capsys):
    monkeypatch.setattr(demo, "PORT", taken)
    port = demo._free_port("127.0.0.1", None)
    assert taken < port < taken + 20
    assert capsys.readouterr().err == f"labkit demo: port {taken} is taken, {port} is used instead\n"


def test_unknown_model_is_refused_before_anything_is_served():
    done = subprocess.run([*COMMAND[:-1], "no-such-model"], env=ELSEWHERE, capture_output=True, text=True, timeout=200)
    assert done.returncode == 2 and done.stdout == ""
    assert "no-such-model" in done.stderr and done.stderr.count("\n") == 1


def test_missing_voila_is_named_with_the_cure(monkeypatch):
    monkeypatch.setitem(sys.modules, "voila.app", None)
    with pytest.raises(LabkitError, match=r"needs voila. Install it with: pip install 'labkit-bidirectional\[viz\]'"):
        demo.serve()


@pytest.mark.parametrize(
    "page, fault",
    [
        ("<html></html>", "without its widgets"),
        (
            f'{demo.OUTPUT}{{"output_type": "error", "ename": "ValueError", "evalue": "no"}}</script>',
            "the app failed: ValueError: no",
        ),
        (f'{demo.OUTPUT}{{"output_type": "display_data", "data": {{"{demo.WIDGET}": {{}}}}}}</script>', ""),
    ],
)
def test_check_tells_a_good_page_from_a_bad_one(page, fault, tmp_path):
    (tmp_path / "index.html").write_text(page)
    port = free_port()
    files = subprocess.Popen([sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1"], cwd=tmp_path,
                             stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip
    try:
        _wait(f"http://127.0.0.1:{port}/")
        found = demo._fault_of_page(f"http://127.0.0.1:{port}/")
    finally:
        files.terminate()
        files.wait()
    assert fault in found and bool(fault) == bool(found)
    assert "could not be fetched" in demo._fault_of_page(f"http://127.0.0.1:{port}/")


def test_the_app_is_widgets_on_the_model_that_was_asked_for(monkeypatch):
    from labkit.demo.app import app

    monkeypatch.setenv(demo.VARIABLE, "tiny-gpt2")
    shown = app()
    assert shown.titles == ("Mask playground", "Attention explorer")
    playground, explorer = shown.children
    assert playground.wait(60.0) and playground.model_name == "tiny-gpt2" and playground.answer
    playground.detach()

    before = explorer.children[2]
    assert len(before.tokens) > 5 and before.names == ["causal", "bidirectional"]
    explorer.sentence.value = "the cat"
    assert len(explorer.children[2].tokens) < len(before.tokens)
    assert explorer.notice.value == ""


def test_text_that_cannot_be_explored_is_explained_and_the_last_one_stays():
    import labkit
    from labkit.demo.app import SentenceExplorer

    explorer = SentenceExplorer(labkit.load("tiny-gpt2"), "the cat sat")
    before = explorer.children
    explorer.sentence.value = ""
    assert 'role="alert"' in explorer.notice.value and explorer.children == before
    explorer.sentence.value = "the <dog>"
    assert explorer.notice.value == "" and explorer.children[2] is not before[2]


def _wait(url: str) -> None:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except (OSError, urllib.error.URLError):
            time.sleep(0.1)
    pytest.fail(f"{url} does not answer")
