"""Writing: whole or not at all, and through what is not a regular file, which stays what it is."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
import threading

import pytest
import torch
from safetensors.torch import save_file

from labkit.files import require_writable, write_folder, write_whole

pytestmark = pytest.mark.skipif(os.name != "posix", reason="links, pipes and devices are a POSIX matter")
LONG, WEIGHTS = "text\n" * 1000, {"w": torch.zeros(5000)}


def names(folder) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


def test_text_is_utf8_and_its_line_ends_stay_and_others_can_read_it(tmp_path):
    write_whole(tmp_path / "new" / "a.txt", "ä\r\nb\n")
    assert (tmp_path / "new" / "a.txt").read_bytes() == "ä\r\nb\n".encode()
    (tmp_path / "plain").write_text("")
    assert (tmp_path / "new" / "a.txt").stat().st_mode == (tmp_path / "plain").stat().st_mode  # by the umask


@pytest.mark.parametrize(
    "write",
    [
        lambda folder: write_whole(folder / "out", LONG),
        lambda folder: write_folder(folder / "out", lambda new: save_file(WEIGHTS, new / "w.safetensors")),
        lambda folder: write_folder(folder / "out", lambda new: torch.save(WEIGHTS, new / "w.pt")),
    ],
    ids=["file", "safetensors", "torch"],
)
def test_a_full_disk_is_an_os_error_that_names_the_place_and_leaves_nothing(tmp_path, full_disk, write):
    with full_disk(after=3000), pytest.raises(OSError) as raised:
        write(tmp_path)
    assert raised.value.filename == str(tmp_path / "out") and raised.value.errno in (errno.EFBIG, errno.EIO)
    assert names(tmp_path) == []


def test_a_folder_takes_the_place_of_the_old_one_only_when_it_is_whole(tmp_path):
    def broken(folder):
        (folder / "b").write_text("half")
        raise KeyboardInterrupt

    write_folder(tmp_path / "out", lambda folder: (folder / "a").write_text("old"))
    with pytest.raises(KeyboardInterrupt):
        write_folder(tmp_path / "out", broken)
    assert names(tmp_path) == ["out", "out/a"]
    write_folder(tmp_path / "out", lambda folder: (folder / "c").write_text("new"))
    assert names(tmp_path) == ["out", "out/c"]


def test_links_pipes_and_devices_are_written_through_and_stay_what_they_are(tmp_path):
    link, pipe, target = tmp_path / "link", tmp_path / "pipe", tmp_path / "target"
    link.symlink_to(target)
    write_whole(link, "new")
    assert link.is_symlink() and target.read_text() == "new"
    os.mkfifo(pipe)
    received = []
    reader = threading.Thread(target=lambda: received.append(pipe.read_text()), daemon=True)
    reader.start()
    write_whole(pipe, LONG)
    reader.join(timeout=10)
    assert received == [LONG] and stat.S_ISFIFO(os.stat(pipe).st_mode)
    write_whole("/dev/null", "text")
    with pytest.raises(OSError, match="No space left"):
        write_whole("/dev/full", "text")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode) and names(tmp_path) == ["link", "pipe", "target"]


@pytest.mark.parametrize("place", ["-", "link"])
@pytest.mark.parametrize("into", ["pipe", "file"])
def test_standard_output_is_written_to_in_turn_with_what_is_printed(tmp_path, place, into):
    (tmp_path / "link").symlink_to("/dev/stdout")
    program = f"from labkit.files import write_whole\nprint('a')\nwrite_whole({place!r}, 'b\\n')\nprint('c')"
    (tmp_path / "log").write_text("before\n")
    with (tmp_path / "log").open("a") as log:
        stdout = subprocess.PIPE if into == "pipe" else log
        done = subprocess.run([sys.executable, "-c", program], stdout=stdout, text=True, check=True, cwd=tmp_path)
    written = done.stdout if into == "pipe" else (tmp_path / "log").read_text().removeprefix("before\n")
    assert written == "a\nb\nc\n" and (tmp_path / "link").is_symlink() and names(tmp_path) == ["link", "log"]


@pytest.mark.parametrize("place", ["file/x", "x" * 300, "/proc/x/y"])
def test_what_cannot_be_written_is_known_beforehand(tmp_path, place):
    (tmp_path / "file").write_text("")
    for attempt in (require_writable, lambda path: write_whole(path, "text")):
        with pytest.raises(OSError) as raised:
            attempt(tmp_path / place)
        assert raised.value.filename == str(tmp_path / place)
    assert names(tmp_path) == ["file"]
