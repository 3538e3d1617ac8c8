"""What fits: rows within the positions of a model, and bytes within the memory of a GPU or of a container."""

import psutil
import pytest
import torch
from transformers import GPT2Config, OPTConfig

from labkit.decoder import limits
from labkit.errors import DataError, ModelError


@pytest.mark.parametrize(("limit", "left"), [("9000", 9000 - 8000 + 5000), ("max", None)])
def test_a_container_has_what_is_below_its_limit_and_the_idle_pages_of_files(tmp_path, monkeypatch, limit, left):
    (tmp_path / "memory.max").write_text(limit)
    (tmp_path / "memory.current").write_text("8000")
    (tmp_path / "memory.stat").write_text("anon 1000\nfile 7000\ninactive_file 5000\nactive_file 2000\n")
    monkeypatch.setattr(limits, "CGROUP", tmp_path)
    free = limits.available_bytes()
    assert free == left if left else free > 0.5 * psutil.virtual_memory().available


@pytest.mark.parametrize(("share", "left"), [(1.0, 40 + 6), (0.25, 25 - 14), (0.6, 40 + 6)])
def test_a_gpu_has_what_is_free_and_what_torch_keeps_within_the_share_of_this_process(monkeypatch, share, left):
    cuda = torch.cuda
    monkeypatch.setattr(cuda, "current_device", lambda: 3)
    answers = {"mem_get_info": (40, 100), "memory_reserved": 20, "memory_allocated": 14}
    for name, value in (answers | {"get_per_process_memory_fraction": share}).items():
        monkeypatch.setattr(cuda, name, lambda at, value=value: value if at == 3 else None)
    assert limits.available_bytes("cuda") == limits.available_bytes("cuda:3") == left


def test_memory_is_judged_in_the_dtype_that_is_asked_for(monkeypatch):
    monkeypatch.setattr(limits, "available_bytes", lambda device="cpu": int(3e9))
    limits.require_memory_for_model("m", 10**9, torch.bfloat16)
    with pytest.raises(ModelError, match=r"m in float32 .* 4\.\d GB.*3\.0 GB free.*dtype='bfloat16'"):
        limits.require_memory_for_model("m", 10**9, torch.float32)


@pytest.mark.parametrize("config", [GPT2Config(n_positions=32), OPTConfig(max_position_embeddings=32)])
def test_a_row_may_be_as_long_as_the_model_has_positions(config):
    limits.require_positions(32, config)
    with pytest.raises(DataError, match="33 tokens, and the model has 32 positions.*--max-length 32"):
        limits.require_positions(33, config, refusal=DataError)
