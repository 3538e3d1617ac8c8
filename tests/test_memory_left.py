"""How much memory a container has left, as the two versions of the kernel's files say it."""

import psutil
import pytest
import torch

from labkit.decoder import limits as memory


def files(folder, limit: str, used: int, statistics: str | None):
    for name, text in (("limit", limit), ("used", str(used)), ("statistics", statistics)):
        if text is not None:
            (folder / name).write_text(text)
    return (*(str(folder / name) for name in ("limit", "used", "statistics")), "inactive_file")


def test_pages_of_files_that_were_read_count_as_free(tmp_path, monkeypatch):
    statistics = "anon 1000\nfile 7000\ninactive_file 5000\nactive_file 2000\n"
    monkeypatch.setattr(memory, "CGROUPS", (files(tmp_path, "9000", 8000, statistics),))
    assert memory.available_bytes() == 9000 - 8000 + 5000


@pytest.mark.parametrize(("limit", "left"), [("max", None), ("9000", 1000)])
def test_no_limit_is_no_limit_and_no_statistics_are_no_pages(tmp_path, monkeypatch, limit, left):
    of = files(tmp_path, limit, 8000, None)
    assert memory._left_in_container(of) == left
    monkeypatch.setattr(memory, "CGROUPS", (of,))
    free = psutil.virtual_memory().available
    assert memory.available_bytes() == left if left else memory.available_bytes() > 0.5 * free


def test_the_files_are_those_of_both_versions_of_the_kernel():
    second, first = memory.CGROUPS
    assert second[0] == "/sys/fs/cgroup/memory.max" and second[2:] == ("/sys/fs/cgroup/memory.stat", "inactive_file")
    assert first[0] == "/sys/fs/cgroup/memory/memory.limit_in_bytes"
    assert first[1] == "/sys/fs/cgroup/memory/memory.usage_in_bytes"


@pytest.mark.parametrize(("share", "left"), [(1.0, 40 + 6), (0.25, 25 - 14), (0.6, 40 + 6)])
def test_a_gpu_has_what_is_free_and_what_torch_keeps_within_the_share_of_this_process(monkeypatch, share, left):
    cuda = torch.cuda
    monkeypatch.setattr(cuda, "current_device", lambda: 3)
    asked = {"mem_get_info": (40, 100), "memory_reserved": 20, "memory_allocated": 14}
    for name, value in (asked | {"get_per_process_memory_fraction": share}).items():
        monkeypatch.setattr(cuda, name, lambda at, value=value: value if at == 3 else None)
    assert memory.available_bytes("cuda") == memory.available_bytes("cuda:3") == left
