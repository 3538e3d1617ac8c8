"""A converted model whose weights are sharded over two processes (FSDP) computes what the whole model computes.

accelerate does not shard on CPUs, so the shards are made by torch's own `fully_shard`, which accelerate calls on GPUs.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.acceptance.command_line import PATHS, TORCHRUN

pytest.importorskip("resource", reason="torchrun with gloo is for POSIX systems")
pytestmark = pytest.mark.end_to_end

SHARDED = """
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import labkit
from labkit.decoder.anatomy import find_decoder
from labkit.decoder.packing import packed

dist.init_process_group("gloo")
model = labkit.load("tiny-llama", device="cpu").model
labkit.to_bidirectional(model)
ids = torch.randint(5, 90, (3, 12), generator=torch.Generator().manual_seed(0))
real = torch.arange(12) < torch.tensor([[12], [7], [4]])  # (3, 12), padded on the right


def outputs():
    plain = model(input_ids=ids, attention_mask=real.long()).logits[real]
    with packed(model):
        together = model(input_ids=ids, attention_mask=real.long()).logits[real]
    return plain, together


def gradient():
    model.zero_grad()
    model(input_ids=ids, attention_mask=real.long()).logits[real].square().mean().backward()
    weight = find_decoder(model).layers[0].self_attn.q_proj.weight.grad
    return weight.full_tensor() if hasattr(weight, "full_tensor") else weight.clone()


expected, expected_gradient = outputs(), gradient()
mesh = init_device_mesh("cpu", (2,))
for layer in find_decoder(model).layers:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
assert find_decoder(model).layers[0].self_attn.q_proj.weight.to_local().numel() * 2 == 64 * 64  # half of it
for got, reference in zip(outputs(), expected, strict=True):
    torch.testing.assert_close(got, reference, atol=1e-5, rtol=1e-5)
torch.testing.assert_close(gradient(), expected_gradient, atol=1e-6, rtol=1e-4)
dist.destroy_process_group()
"""


def test_a_converted_model_that_is_sharded_computes_what_the_whole_model_computes(tmp_path):
    script = tmp_path / "sharded.py"
    script.write_text(SHARDED)
    command = [sys.executable, *TORCHRUN, str(script)]
    run = subprocess.run(command, env=os.environ | PATHS, capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stderr[-3000:]
