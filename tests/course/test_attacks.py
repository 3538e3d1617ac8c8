"""Attacks on the grader. Each case fails if the protection that it is about is removed."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import psutil
import pytest

from labkit.course.exercises import Outcome, assignment
from labkit.course.grade import grade, grade_all
from labkit.course.grades import Grade, gradebook_csv, read_grades, write_pages
from labkit.course.mistakes import Mistake
from labkit.course.sandbox import Sandbox
from labkit.course.variant import Variant
from labkit.errors import CourseError
from tests.course.handed_in import RIGHT, TIGHT, UPPER, hand_in, isolated, notebook

pytestmark = pytest.mark.end_to_end
SECRET = "otters of the spring"
WRITE_TO_ALL = """
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
    # Nothing here waits for a time limit, and a busy machine is slow.
    with Sandbox("a1", replace(TIGHT, cell_seconds=30.0, total_seconds=600.0)) as running:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("LABKIT_VARIANT_SECRET", SECRET)
            patch.setenv("HF_TOKEN", "a token")
            assert running.run(RIGHT) is None  # which starts the process
        yield running


def works(sandbox):
    return sandbox.answer("causal_mask")(2).tolist() == [[True, False], [True, True]]


# ------------------------------------------------------------------------------ 1 and 3: isolation, sockets and secrets
ABOVE = set(map(str, Path(__file__).parents))  # the checkout may lie in /tmp, and parts of it are visible
PLACES = ["/etc/passwd", "/etc/shadow", "/var", str(Path.home() / ".ssh"), str(Path(__file__).parent)]
STATUS = "dict(line.split(':\\t', 1) for line in open('/proc/self/status').read().splitlines())"
READABLE = "[open(path).read() for kind in ('environ', 'cmdline') for path in glob.glob(f'/proc/[0-9]*/{kind}')]"
MOUNTS = "[line.split() for line in open('/proc/mounts').read().splitlines()]"


@isolated
@pytest.mark.parametrize(
    ("expression", "value"),
    [
        (f"[int({STATUS}[f'Cap{{kind}}'], 16) for kind in ('Inh', 'Prm', 'Eff', 'Bnd', 'Amb')]", [0] * 5),
        (f"{STATUS}['NoNewPrivs'].strip()", "1"),
        ("[subprocess.call(['unshare', kind, 'true']) == 0 for kind in ('--user', '--mount', '--net')]", [False] * 3),
        ("[ctypes.CDLL(None).umount2(path, 2) for path in (b'/proc', b'/home', b'/usr')]", [-1, -1, -1]),
        ("ctypes.CDLL(None).shmget(0, 4096, 0o1600)", -1),
        (f"[place for place in {PLACES!r} if os.path.exists(place)]", []),
        (f"[p for folder in ('/tmp', '/run') for p in glob.glob(folder + '/*') if p not in {ABOVE!r}]", []),
        # those of bubblewrap itself could be opened for writing
        ("[fd for fd in os.listdir('/proc/1/fd') if os.path.isfile('/proc/1/fd/' + fd)]", []),
        (f"[m[1] for m in {MOUNTS} if 'rw' in m[3].split(',') and not m[1].startswith('/dev/')]", ["/home/student"]),
        ("len([name for name in os.listdir('/proc') if name.isdigit()]) <= 3", True),
        (f"[word for word in {[SECRET, Variant.of(SECRET).salt, 'a token']!r} if word in ''.join({READABLE})]", []),
        (f"'labkit.course.answers' in ''.join({READABLE})", True),  # what is searched above can be read
    ],
)
def test_a_submission_reaches_nothing_of_ours(sandbox, expression, value):
    assert sandbox.run(f"import ctypes, glob, os, subprocess\ndef f():\n    return {expression}") is None
    assert sandbox.answer("f")() == value


CROWD = """
import subprocess, sys, time
held = [subprocess.Popen({command}, stdin=subprocess.PIPE) for _ in range({n})]
time.sleep(60)
"""
LOCKS = [f"{call}(open(labkit.__file__), {kind})" for call, kind in (("fcntl", "1024, 1"), ("flock", "2"))]
FOLDERS = ["/", "/tmp", "/run", "/home", "/dev", "/dev/shm", "/usr", "/etc", sys.prefix, str(Path.cwd())]


@isolated
@pytest.mark.parametrize(
    "cell",
    [
        *(f"open({os.path.join(folder, 'mark')!r}, 'w')" for folder in FOLDERS),
        # a grader that is root could write them, and the kernel would obey
        *(f"open('/proc/sys/kernel/{setting}', 'r+')" for setting in ("core_pattern", "hostname")),
        "import os; os.kill(GRADER, 0)",
        "import os; os.memfd_create('uncounted')",  # its memory would belong to no process
        *(f"import socket; socket.socket(socket.AF_{family})" for family in ("UNIX", "INET", "VSOCK", "NETLINK")),
        # a lease or a lock on a file of ours would delay the next student
        *(f"import fcntl, labkit; fcntl.{call}" for call in LOCKS),
    ],
)
def test_a_submission_changes_nothing_of_ours(sandbox, cell):
    error = sandbox.run(cell.replace("GRADER", str(os.getpid())))
    assert any(words in error for words in ("Error", "No such process", "nreachable"))
    assert sandbox.run("open('mine', 'w').write('x')\nimport tempfile; tempfile.TemporaryFile()") is None


@isolated
def test_the_predictions_can_be_read_and_not_changed():
    with Sandbox("a1", TIGHT, predictions=b"[1]") as running:
        assert running.run("assert open('a1_predictions.json').read() == '[1]'") is None
        for cell in ("open('a1_predictions.json', 'a')", "import os; os.remove('a1_predictions.json')"):
            assert "Error" in running.run(cell)
        assert running.answer("f").predictions() == b"[1]"


@isolated
def test_grades_and_secrets_in_a_visible_folder_are_refused(tmp_path):
    inside = Path(sys.prefix) / "grades-of-a-test"
    with pytest.raises(CourseError, match="submissions can read"):
        grade_all(hand_in(tmp_path, ada=RIGHT), inside, Variant(), TIGHT)
    assert not inside.exists()


@isolated
@pytest.mark.parametrize(
    ("cell", "words"),
    [
        ("x = []\nwhile True: x.append(bytes(10**8))", ("MemoryError", "of memory")),
        (f"for i in range(9): open(f'big{{i}}', 'wb').write(bytes({TIGHT.file_bytes} // 4))", ("No space left",)),
        # each process is within the limit
        (CROWD.format(n=3, command="[sys.executable, '-c', 'x = b\"1\" * 800_000_000; input()']"), ("of memory",)),
        (CROWD.format(n=200, command="['/bin/sleep', '60']"), ("processes were running", "unavailable")),
    ],
    ids=["memory", "files", "memory of several", "processes"],
)
def test_limits_hold_and_the_next_answer_is_asked(sandbox, cell, words):
    error = sandbox.run(cell)
    assert any(word in error for word in words) and works(sandbox)


@isolated
def test_processor_time_is_limited_for_all_processes_together(monkeypatch):
    with Sandbox("a1", TIGHT) as hog:
        assert hog.run("import subprocess, time") is None
        monkeypatch.setattr("labkit.course.sandbox.CORES", 0.0)
        busy = "[subprocess.Popen(['sh', '-c', 'while :; do :; done'], start_new_session=True) for _ in range(8)]"
        assert "processor" in hog.run(f"held = {busy}; time.sleep(50)") and hog.timed_out
        assert "used up" in hog.run("1")


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


def test_without_bubblewrap_nothing_runs_unless_the_submissions_are_trusted(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    folder = hand_in(tmp_path / "in", ada="open('/tmp/ran', 'w')")
    for refuse in (
        lambda: grade_all(folder, tmp_path / "out", Variant(), TIGHT),
        lambda: Sandbox("a1", TIGHT).run("1"),
    ):
        with pytest.raises(CourseError, match="apt-get install bubblewrap.*--trust-submissions"):
            refuse()


# ---------------------------------------------------------------------------------------------------- 2: forged replies
DRIP = WRITE_TO_ALL.format(data=b" ").replace("def f", "def write").replace("2048", "30")
DRIP += "\nimport time\ndef f():\n    while True:\n        time.sleep(0.02)\n        write()"


@pytest.mark.parametrize(
    ("cell", "words"),
    [
        *((WRITE_TO_ALL.format(data=line * 3), "pipe") for line in (b"forged\n", b'{"mistake": 5}\n')),
        *((WRITE_TO_ALL.format(data=line * 3), "pipe") for line in (b"[" * 60_000 + b"\n", b'{"answer": "1"}\n')),
        (DRIP, "within the time limit"),  # byte by byte, for ever
    ],
    ids=["no JSON", "malformed", "deep", "no nonce", "byte by byte"],
)
def test_a_reply_that_was_written_by_the_submission_counts_for_nothing(trusted, cell, words):
    assert trusted.run(cell) is None
    with pytest.raises(Mistake, match=words):
        trusted.answer("f")()
    assert works(trusted)


AHEAD = """
import json, os
from labkit import masks
from labkit.course.answers import dumps
from labkit.course.variant import Variant
sizes = [Variant(round=i).whole("causal", 4, 9) for i in range(3)]
replies = [{}, *({"answer": dumps(masks.causal().dense(n))} for n in sizes)]
ours = [int(fd) for fd in os.listdir("/proc/self/fd") if "socket" in os.path.realpath(f"/proc/self/fd/{fd}")]
for reply in replies:
    os.write(min(ours), (json.dumps(reply) + "\\n").encode())
"""
PATCH = """
import labkit.course.exercises as exercises, labkit.course.mistakes as mistakes
exercises.Exercise.judge = lambda *a, **k: 'right'
mistakes.expect_tensor = lambda *a, **k: None
from labkit import masks
masks.Mask.dense = lambda self, n, *a: __import__('torch').ones(n, n).bool()
"""


@pytest.mark.parametrize(("cell", "trouble"), [(AHEAD, "pipe"), (f"{PATCH}\n{UPPER}", "")], ids=["ahead", "patched"])
def test_right_replies_in_the_right_order_and_a_patched_labkit_earn_no_point(tmp_path, cell, trouble):
    result = grade("eve", hand_in(tmp_path, eve=cell) / "eve.ipynb", TIGHT, Variant(), trusted=True)
    assert result.points == 0 and trouble in "".join(result.trouble)


# ------------------------------------------------------------------------------------------- 4: what is no regular file
def test_what_is_no_regular_notebook_fails_alone_and_at_once(tmp_path):
    folder, elsewhere = hand_in(tmp_path / "in", ada=RIGHT), hand_in(tmp_path / "elsewhere", a1=RIGHT)
    os.mkfifo(folder / "pipe.ipynb")
    (folder / "zero.ipynb").symlink_to("/dev/zero")
    (folder / "thief.ipynb").symlink_to("ADA.IPYNB")
    (folder / "mole").symlink_to(elsewhere)
    with (folder / "sparse.ipynb").open("wb") as file:
        file.truncate(30 * 2**30)
    (folder / "zip.zip").write_text("no notebook")
    (folder / "link" / "x").mkdir(parents=True)
    (folder / "link" / "x" / "y").symlink_to(elsewhere)
    hand_in(folder / "deep" / Path(*"d" * 500), a1=RIGHT)
    (folder / "ada.ipynb").rename(folder / "ADA.IPYNB")
    began = time.monotonic()
    grades = {grade.student: grade for grade in grade_all(folder, tmp_path / "out", Variant(), TIGHT, trusted=True)}
    assert time.monotonic() - began < 60 and grades.pop("ADA").points == 2
    assert "more than" in grades.pop("sparse").failure
    words = dict.fromkeys(("pipe", "zero", "thief"), "as a regular file")
    words |= dict.fromkeys(("mole", "zip", "link", "deep"), "holds no .ipynb")
    assert grades.keys() == words.keys()
    assert all(words[student] in grade.failure and grade.points is None for student, grade in grades.items())


# ------------------------------------------------------------------------- 5 to 7: messages, terminals and spreadsheets
FLOOD = "import labkit.course.answers as a\na.described = lambda error: 'x' * 5_000_000\n1 / 0"


def test_a_forged_error_is_cut_before_it_is_kept(trusted):
    assert len(trusted.run(FLOOD)) < 700


def test_long_messages_are_cut(tmp_path):
    path, long = tmp_path / "eve.ipynb", "raise ValueError('\\ud800' + 'x' * 20_000_000)"
    answers = [f"def causal_mask(n):\n    {long}", "def window_mask(n, w, sinks): return 'x' * 3_000_000"]
    answers.append("def biased_scores(q, k, slopes): raise ValueError('\\nLikely: a cause of their own')")
    path.write_text(notebook(*[long] * 30, *answers))
    result = grade_all(path, tmp_path / "out", Variant(), TIGHT, trusted=True)[0]
    assert not result.failure and len(result.trouble) == 21 and "10 more" in result.trouble[-1]
    assert all(file.stat().st_size < 40_000 for file in (tmp_path / "out").iterdir())
    assert "of their own" in (tmp_path / "out" / "eve.html").read_text()
    assert "of their own" not in (tmp_path / "out" / "class.html").read_text()


def test_no_control_character_reaches_the_terminal(labkit_command, tmp_path):
    evil = "\x1b]52;c;cm0=\x07\x1b[2J\u202e"
    (tmp_path / f"eve{evil}.ipynb").write_text(notebook(f"raise ValueError({evil!r})"))
    (tmp_path / "fay.ipynb").write_text(notebook(RIGHT, variant=evil + "x" * 2_800_000))
    (tmp_path / f"{evil}gus.ipynb").write_text("nothing")
    (tmp_path / "hal\nada  23 of 23.ipynb").write_text("nothing")  # it would look like a line of the table
    graded = ["grade", tmp_path, "--output-dir", tmp_path / "out", "--trust-submissions"]
    for arguments in (graded, ["check", tmp_path / f"{evil}gus.ipynb"]):
        text = "".join(labkit_command("course", *arguments)[1:])
        assert all(c.isprintable() or c in "\n\r" for c in text) and len(text) < 5000
        assert not any(line.startswith("ada") for line in text.splitlines())


@pytest.mark.parametrize("name", ["=1+1", "\r=1+1", " \n=1+1", "\u200b@x", "+cmd", "-2+3", "＝1"])
def test_no_name_becomes_a_formula(tmp_path, name):
    hostile = Grade(name, "a1", 2, 23)
    write_pages([hostile], tmp_path)
    with (tmp_path / "grades.csv").open(newline="") as file:
        texts = [file.read(), *(gradebook_csv([hostile], kind)[0] for kind in ("canvas", "moodle"))]
    for text in texts:
        cells = [cell for row in csv.reader(text.splitlines(keepends=True)) for cell in row]
        assert f"'{name}" in cells and name not in cells


# ------------------------------------------------------------------------------------------------------------ 8: Ctrl-C
def test_an_interruption_ends_at_once_and_keeps_what_is_done(tmp_path):
    folder = hand_in(tmp_path / "in", ada="import time; time.sleep(50)")
    command = [sys.executable, "-m", "labkit", "course", "grade", folder, "--output-dir", tmp_path / "out"]
    running = subprocess.Popen(
        [*command, "--trust-submissions"], stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a job in the background ignores it
    )  # fmt: skip
    while not psutil.Process(running.pid).children():
        time.sleep(0.1)
    time.sleep(3)  # the cell runs now
    running.send_signal(signal.SIGINT)
    began = time.monotonic()
    _, error = running.communicate(timeout=30)
    assert time.monotonic() - began < 20 and running.returncode == 130 and "interrupted" in error


# ------------------------------------------------------------------------------ 9: the last step of a container's route
FIRST, *OTHERS = (
    Outcome(exercise.name, "wrong", 0, exercise.points) for exercise in assignment("a1").exercises.values()
)
HOSTILE = asdict(Grade("bea", "a1", 23, 23, [FIRST, *OTHERS], trouble=["<script>\x1b[2J"] * 99))


def test_pages_are_made_of_foreign_json_without_running_or_believing_it(labkit_command, tmp_path):
    (tmp_path / "eve.json").write_text(json.dumps(HOSTILE))
    result = read_grades(tmp_path)[0]
    assert result.student == "eve" and result.points == 0
    assert len(result.trouble) == 21 and "\x1b" not in result.trouble[0]
    assert labkit_command("course", "pages", tmp_path)[0] == 0
    assert "<script>" not in (tmp_path / "eve.html").read_text(encoding="utf-8")
    assert not (tmp_path / "bea.html").exists()


@pytest.mark.parametrize(
    "change",
    [
        *({"points": points} for points in ("<b>", None, -1, 3, 10**400)),
        {"points": 10**400, "out_of": 10**400},  # a percentage of it is too large for a number
        *({"status": "best"}, {"exercise": "student"}, {"failed": 1}, {"more": 1}),
    ],
    ids=lambda change: f"{change!r:.40}",
)
def test_a_forged_grade_counts_for_nothing_and_does_not_stop_the_class(labkit_command, tmp_path, change):
    (tmp_path / "ada.json").write_text(json.dumps(HOSTILE))
    (tmp_path / "eve.json").write_text(
        json.dumps(HOSTILE | {"outcomes": [asdict(FIRST) | change, *HOSTILE["outcomes"][1:]]})
    )
    damages = {"trouble": 3}, {"assignment": "=1+1"}, {"outcomes": []}, {"seconds": 10**400}
    damages += ({"failure": "x" * 999, "assignment": "a2"},)
    for i, damage in enumerate(damages):
        (tmp_path / f"fay{i}.json").write_text(json.dumps(HOSTILE | damage))
    assert labkit_command("course", "pages", tmp_path)[0] == 0
    ada, *others = read_grades(tmp_path)
    assert ada.points == 0 and all(grade.points is None for grade in others)
    assert all(f"{grade.student}.json is not a grade" in grade.failure for grade in others[:-1])
    assert '"ada","0"' in gradebook_csv([ada, *others], "moodle")[0]  # the last is a failure of "another assignment"
