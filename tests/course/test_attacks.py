"""Attacks on the grader. Each test fails if the protection that it is about is removed."""

import csv
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from labkit import cli
from labkit.course import submissions
from labkit.course.grade import grade, grade_all
from labkit.course.gradebook import class_csv, gradebook_csv
from labkit.course.grades import Grade, read_grades
from labkit.course.mistakes import Mistake
from labkit.course.sandbox import Limits, Sandbox, require_isolation
from labkit.course.variant import Variant
from labkit.errors import CourseError
from tests.course.handed_in import RIGHT, TIGHT, UPPER, isolated, notebook

pytestmark = pytest.mark.end_to_end
WRITES_TO_ALL = """
def f():
    import os
    for fd in range(3, 2048):
        try:
            os.write(fd, {data!r})
        except OSError:
            pass
"""


@pytest.fixture(scope="module")
def sandbox():
    with Sandbox("a1", TIGHT) as running:
        assert running.run(RIGHT) is None
        yield running


@pytest.fixture
def evaluated(sandbox):
    """The value of an expression, of plain values, in the process of a submission."""

    def value(expression, setup="pass"):
        assert sandbox.run(f"import os, socket, ctypes\n{setup}\ndef f():\n    return {expression}") is None
        return sandbox.answer("f")()

    return value


# ------------------------------------------------------------------------------ 1 and 3: isolation, sockets and secrets
@isolated
def test_a_submission_has_no_capabilities_and_cannot_get_any(evaluated):
    status = dict(line.split(":\t", 1) for line in evaluated("open('/proc/self/status').read()").splitlines())
    assert all(int(status[f"Cap{kind}"], 16) == 0 for kind in ("Inh", "Prm", "Eff", "Bnd", "Amb"))
    assert status["NoNewPrivs"].strip() == "1"
    libc = "libc = ctypes.CDLL(None)"
    for kind in ("--user", "--mount", "--net"):
        assert evaluated(f"__import__('subprocess').call(['unshare', {kind!r}, 'true'])") != 0
    assert evaluated("[libc.umount2(path, 2) for path in (b'/proc', b'/home', b'/usr')]", libc) == [-1, -1, -1]


@isolated
def test_only_its_own_folder_can_be_written(sandbox, evaluated, tmp_path):
    assert sandbox.run("open('mine', 'w').write('x')\nimport tempfile; tempfile.TemporaryFile()") is None
    (tmp_path / "bea.ipynb").write_text("hers")
    for place in ("/", "/tmp", "/run", "/home", "/dev", "/dev/shm", "/usr", "/etc", sys.prefix, str(Path.cwd())):
        assert "Error" in sandbox.run(f"open({place + '/mark'!r}, 'w')"), place
    for setting in ("core_pattern", "hostname"):  # a grader that is root could write them, and the kernel would obey
        assert "Error" in sandbox.run(f"open('/proc/sys/kernel/{setting}', 'r+')")
    files = "[fd for fd in os.listdir('/proc/1/fd') if os.path.isfile('/proc/1/fd/' + fd)]"
    assert evaluated(files) == []  # those of bubblewrap itself could be opened for writing
    mounts = evaluated("open('/proc/mounts').read()").splitlines()
    writable = {line.split()[1] for line in mounts if "rw" in line.split()[3].split(",")}
    assert {path for path in writable if not path.startswith("/dev/")} == {"/home/student"}


@isolated
def test_no_file_of_ours_or_of_other_students_is_visible(evaluated, tmp_path):
    (tmp_path / "bea.ipynb").write_text("hers")
    places = [
        str(tmp_path),
        str(Path.home() / ".ssh"),
        "/etc/passwd",
        "/etc/shadow",
        "/var",
        str(Path(__file__).parent),
    ]
    assert evaluated(f"[place for place in {places!r} if os.path.exists(place)]") == []


@isolated
def test_grades_and_secrets_in_a_visible_folder_are_refused(tmp_path):
    (tmp_path / "ada.ipynb").write_text(notebook(RIGHT))
    inside = Path(sys.prefix) / "grades-of-a-test"
    with pytest.raises(CourseError, match="submissions can read"):
        grade_all(tmp_path / "ada.ipynb", inside)
    assert not inside.exists()


@isolated
def test_nothing_of_ours_is_in_its_environment_or_its_command_line(monkeypatch, tmp_path):
    secret = "otters of the spring"
    monkeypatch.setenv("LABKIT_VARIANT_SECRET", secret)
    monkeypatch.setenv("HF_TOKEN", "a token")
    variant = Variant.of(secret)
    with Sandbox("a1", TIGHT) as other:
        cell = """
import glob
def f():
    text = b""
    for path in glob.glob("/proc/[0-9]*/environ") + glob.glob("/proc/[0-9]*/cmdline"):
        text += open(path, "rb").read()
    return text.decode()
"""
        assert other.run(cell) is None
        visible = other.answer("f")()
    assert "labkit.course.child" in visible and "HF_TOKEN" not in visible
    assert secret not in visible and variant.salt not in visible


@isolated
def test_no_process_socket_or_network_is_within_reach(sandbox, evaluated, tmp_path):
    assert evaluated("len([name for name in os.listdir('/proc') if name.isdigit()])") <= 3
    assert "No such process" in sandbox.run(f"os.kill({os.getpid()}, 0)")
    with socket.socket(socket.AF_UNIX) as by_path, socket.socket(socket.AF_UNIX) as abstract, socket.socket() as tcp:
        by_path.bind(str(tmp_path / "agent"))
        abstract.bind(f"\0agent of {os.getpid()}")
        tcp.bind(("127.0.0.1", 0))
        for server in (by_path, abstract, tcp):
            server.listen()
            family = "AF_INET" if server is tcp else "AF_UNIX"
            connect = f"socket.socket(socket.{family}).connect({server.getsockname()!r})"
            assert "Error" in sandbox.run(connect)
    assert "unreachable" in sandbox.run("socket.create_connection(('192.0.2.1', 80), 2)").lower()


@isolated
def test_memory_files_and_processes_are_limited(sandbox):
    assert sandbox.run("def f():\n    x = []\n    while True: x.append(bytes(10**8))") is None
    with pytest.raises(Mistake, match="MemoryError|of memory"):
        sandbox.answer("f")()
    fill = f"for i in range(9): open(f'big{{i}}', 'wb').write(bytes({TIGHT.file_bytes} // 4))"
    assert "No space left" in sandbox.run(fill)
    several = """
import subprocess, sys, time
for _ in range(3):
    subprocess.Popen([sys.executable, "-c", "x = b'1' * 800_000_000; import time; time.sleep(60)"])
time.sleep(60)
"""
    assert "of memory" in sandbox.run(several)  # each of them is within the limit
    crowd = "import subprocess, time\nfor _ in range(200): subprocess.Popen(['/bin/sleep', '60'])\ntime.sleep(60)"
    error = sandbox.run(crowd)
    assert "processes were running" in error or "unavailable" in error
    assert sandbox.answer("causal_mask")(2).tolist() == [[True, False], [True, True]]


@isolated
def test_what_it_leaves_running_ends_with_it():
    mark = f"left running by {os.getpid()}"
    loop = f"import os, time; os.setsid(); {mark!r}\nif os.fork(): os._exit(0)\nwhile True: time.sleep(0.05)"

    def running():
        return [p for p in psutil.process_iter(["cmdline"]) if mark in " ".join(p.info["cmdline"] or [])]

    with Sandbox("a1", TIGHT) as other:
        start = f"import subprocess, sys, time\nsubprocess.Popen([sys.executable, '-c', {loop!r}]); time.sleep(1)"
        assert other.run(start) is None and running()
    time.sleep(0.5)
    assert not running()


# ---------------------------------------------------------------------------------------------------- 2: forged replies
@pytest.fixture(scope="module")
def trusted():
    with Sandbox("a1", TIGHT, trusted=True) as running:
        assert running.run(RIGHT) is None
        yield running


@pytest.mark.parametrize("line", [b"forged\n", b'{"mistake": 5}\n', b"[" * 60_000 + b"\n", b'{"answer": "1"}\n'])
def test_a_reply_that_was_written_ahead_counts_for_nothing(trusted, line):
    assert trusted.run(WRITES_TO_ALL.format(data=line * 3)) is None
    with pytest.raises(Mistake, match="pipe"):
        trusted.answer("f")()
    assert trusted.answer("causal_mask")(2).tolist() == [[True, False], [True, True]]


def test_a_reply_that_comes_byte_by_byte_ends_with_the_time_limit(trusted):
    write = WRITES_TO_ALL.format(data=b" ").replace("def f", "def write").replace("2048", "30")
    drip = f"{write}\nimport time\ndef f():\n    while True:\n        time.sleep(0.02)\n        write()"
    assert trusted.run(drip) is None
    with pytest.raises(Mistake, match="within 3 seconds"):
        trusted.answer("f")()


def test_replies_without_one_defined_answer_earn_no_point(tmp_path):
    """The right answers in the right order, written ahead, after the reply to the cell that writes them."""
    cell = """
import json, os
from labkit import masks
from labkit.course import wire
from labkit.course.variant import Variant
sizes = [Variant().another_round(i).whole("causal", 4, 9) for i in range(3)]
replies = [{"error": None}, *({"answer": wire.dumps(masks.causal().dense(n))} for n in sizes)]
for reply in replies:
    for fd in range(3, 30):
        try:
            os.write(fd, (json.dumps(reply) + "\\n").encode())
            break
        except OSError:
            pass
"""
    path = tmp_path / "eve.ipynb"
    path.write_text(notebook(cell))
    result = grade(submissions.read("eve", path), limits=TIGHT, trusted=True)
    assert result.points == 0 and "pipe" in result.trouble[0]


def test_a_patched_labkit_changes_no_grade(tmp_path):
    patch = (
        "import labkit.course.judging as judging, labkit.course.mistakes as mistakes\n"
        "judging.judged = lambda *a, **k: 'right'\nmistakes.expect_tensor = lambda *a, **k: None\n"
        "from labkit import masks\nmasks.Mask.dense = lambda self, n, *a: __import__('torch').ones(n, n).bool()"
    )
    path = tmp_path / "eve.ipynb"
    path.write_text(notebook(patch, UPPER))
    result = grade(submissions.read("eve", path), limits=TIGHT, trusted=True)
    assert result.points == 0 and result.outcomes[0].status == "wrong"


def test_the_secret_is_never_an_argument(tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["course", "grade", str(tmp_path), "--variant", "spring, group 2"])
    assert stopped.value.code == 2 and "file" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------- 4: what is no regular file
def test_links_pipes_and_huge_files_fail_alone_and_at_once(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "ada.ipynb").write_text(notebook(RIGHT))
    os.mkfifo(folder / "pipe.ipynb")
    (folder / "zero.ipynb").symlink_to("/dev/zero")
    (folder / "thief.ipynb").symlink_to("ada.ipynb")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "a1.ipynb").write_text(notebook(RIGHT))
    (folder / "mole").symlink_to(tmp_path / "elsewhere")
    with (folder / "sparse.ipynb").open("wb") as file:
        file.truncate(30 * 2**30)
    began = time.monotonic()
    grades = {each.student: each for each in grade_all(folder, tmp_path / "out", limits=TIGHT, trusted=True)}
    assert time.monotonic() - began < 60 and grades.pop("ada").points == 2
    assert set(grades) == {"pipe", "zero", "thief", "mole", "sparse"}
    assert all(each.points is None for each in grades.values()) and "more than" in grades.pop("sparse").failure
    assert all("not a regular file" in each.failure for each in grades.values())


# ------------------------------------------------------------------------- 5 to 7: messages, terminals and spreadsheets
def test_long_messages_are_cut(tmp_path):
    path, long = tmp_path / "eve.ipynb", "raise ValueError('\\ud800' + 'x' * 20_000_000)"
    path.write_text(
        notebook(*[long] * 30, f"def causal_mask(n):\n    {long}", "def window_mask(n, w): return 'x' * 3_000_000")
    )
    result = grade_all(path, tmp_path / "out", limits=TIGHT, trusted=True)[0]
    assert not result.failure and len(result.trouble) == 21 and "10 more" in result.trouble[-1]
    assert all(file.stat().st_size < 40_000 for file in (tmp_path / "out").iterdir())


def test_no_control_character_reaches_the_terminal(tmp_path, capsys):
    evil = "\x1b]52;c;cm0=\x07\x1b[2J\u202e"
    (tmp_path / f"eve{evil}.ipynb").write_text(notebook(f"raise ValueError({evil!r})"))
    (tmp_path / "fay.ipynb").write_text(notebook(RIGHT, variant=evil + "x" * 2_800_000))
    (tmp_path / f"{evil}gus.ipynb").write_text("nothing")
    graded = ["grade", tmp_path, "--output-dir", tmp_path / "out", "--trust-submissions"]
    for arguments in (graded, ["check", tmp_path / f"{evil}gus.ipynb"]):
        with pytest.raises(SystemExit):
            cli.main(["course", *map(str, arguments)])
        out = capsys.readouterr()
        assert all(c.isprintable() or c in "\n\r" for c in out.out + out.err) and len(out.out + out.err) < 5000


@pytest.mark.parametrize("name", ["=1+1", "\r=1+1", " \n=1+1", "\u200b@x", "+cmd", "-2+3", "＝1"])
def test_no_name_becomes_a_formula(name):
    hostile = Grade(name, "a1", "public", "", 2, 23, [], [], "")
    for text in (class_csv([hostile]), gradebook_csv([hostile], "canvas")[0], gradebook_csv([hostile], "moodle")[0]):
        cells = [cell for row in csv.reader(text.splitlines(keepends=True)) for cell in row]
        assert f"'{name}" in cells and name not in cells


# ------------------------------------------------------------------------------------------------------------ 8: Ctrl-C
def test_an_interruption_ends_at_once_and_keeps_what_is_done(tmp_path):
    (tmp_path / "ada.ipynb").write_text(notebook("import time; time.sleep(50)"))
    command = [sys.executable, "-m", "labkit", "course", "grade", tmp_path, "--output-dir", tmp_path / "out"]
    running = subprocess.Popen(
        [*command, "--trust-submissions"], stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a job in the background ignores it
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while not psutil.Process(running.pid).children() and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(3)  # the cell runs now
    running.send_signal(signal.SIGINT)
    began = time.monotonic()
    _, error = running.communicate(timeout=30)
    assert time.monotonic() - began < 5 and running.returncode == 130 and "interrupted" in error


# ------------------------------------------------------------------------------ 9: the last step of a container's route
def test_pages_are_made_of_foreign_json_without_running_or_believing_it(tmp_path):
    grade_ = Grade("bea", "a1", "public", "", 23, 23, [], ["<script>\x1b[2J"] * 99, "").to_dict()
    (tmp_path / "eve.json").write_text(json.dumps(grade_))
    result = next(read_grades(tmp_path))
    assert result.student == "eve" and len(result.trouble) == 21 and "\x1b" not in result.trouble[0]
    with pytest.raises(SystemExit) as stopped:
        cli.main(["course", "pages", str(tmp_path)])
    assert stopped.value.code == 0 and "<script>" not in (tmp_path / "eve.html").read_text(encoding="utf-8")
    assert not (tmp_path / "bea.html").exists()
    for forged in ({"points": "<b>"}, {"outcomes": [{"status": "best"}]}, {"points": None}, {"trouble": 3}):
        (tmp_path / "eve.json").write_text(json.dumps(grade_ | forged))
        with pytest.raises(CourseError, match="eve.json"):
            list(read_grades(tmp_path))


def test_without_bubblewrap_nothing_runs_unless_the_submissions_are_trusted(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "ada.ipynb").write_text(notebook("open('/tmp/ran', 'w')"))
    for refuse in (require_isolation, lambda: grade_all(tmp_path, tmp_path / "out"), Sandbox("a1", Limits()).__enter__):
        with pytest.raises(CourseError, match="apt-get install bubblewrap.*--trust-submissions"):
            refuse()
