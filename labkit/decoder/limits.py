"""Will it fit? Bytes a model needs, and bytes this machine can still give. Loads torch only to look at a GPU."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from labkit.errors import ModelError, NotEnoughMemoryError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig

GB = 10**9
_V2, _V1 = "/sys/fs/cgroup/memory.", "/sys/fs/cgroup/memory/memory."
CGROUPS = (  # of the kernel's two versions: the limit, what is used, and where to read how much of it idle files are
    (f"{_V2}max", f"{_V2}current", f"{_V2}stat", "inactive_file"),
    (f"{_V1}limit_in_bytes", f"{_V1}usage_in_bytes", f"{_V1}stat", "total_inactive_file"),
)
_OVERHEAD = 1.2  # one more copy of the largest tensors while loading, and room for a short forward pass


def available_bytes(device: str = "cpu") -> int:
    """Bytes that can still be allocated: free GPU memory, or main memory within this process's container limit."""
    if device.startswith("cuda"):
        import torch

        at = torch.device(device).index
        at = torch.cuda.current_device() if at is None else at
        free, whole = torch.cuda.mem_get_info(at)
        kept = torch.cuda.memory_reserved(at) - torch.cuda.memory_allocated(at)  # by torch, for its next tensors
        share = torch.cuda.get_per_process_memory_fraction(at)  # 1, or what this process may have beside others
        return min(free + kept, int(share * whole) - torch.cuda.memory_allocated(at))
    import psutil

    free = psutil.virtual_memory().available
    return min([free, *(left for left in map(_left_in_container, CGROUPS) if left is not None)])


def _left_in_container(files: tuple[str, str, str, str]) -> int | None:
    """Bytes below the container's limit; the files' pages that it keeps for a second reading are given up for them."""
    at_most, in_use, statistics, cached = files
    limit, used = _read_int(at_most), _read_int(in_use)
    if limit is None or used is None:
        return None
    try:
        lines = Path(statistics).read_text(encoding="ascii").splitlines()
    except OSError:
        lines = []
    kept = next((int(line.split()[1]) for line in lines if line.startswith(f"{cached} ")), 0)
    return limit - used + kept


def stored_parameters(folder: Path) -> dict[str, int]:
    """How many parameters the safetensors files in `folder` hold, by stored dtype ("BF16", "F32", ...).

    Only their headers are read. Raises ModelError, naming the file, if one is cut short.
    """
    from safetensors import SafetensorError, safe_open

    counts: Counter[str] = Counter()
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt") as stored:
                for tensor in (stored.get_slice(name) for name in stored.keys()):
                    counts[tensor.get_dtype()] += math.prod(tensor.get_shape())
        except SafetensorError as error:
            raise ModelError(f"{file} is not a complete safetensors file; download or save the model again") from error
    return counts


def main_dtype(stored: dict[str, int]) -> torch.dtype:
    """The torch dtype in which most of the stored parameters are."""
    import torch

    names = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}
    return names.get(max(stored, key=stored.__getitem__, default="F32"), torch.float32)


def configured_parameters(config: PreTrainedConfig, kind: type) -> int:
    """How many parameters a model with this configuration has, counted without allocating any."""
    import torch

    with torch.device("meta"):
        return sum(p.numel() for p in kind(config).parameters())


def require_memory(name: str, parameters: int, dtype: torch.dtype, device: str = "cpu") -> None:
    """Raise NotEnoughMemoryError if `parameters` of `dtype`, with room to work, exceed what `device` can still give."""
    needed, free = int(parameters * dtype.itemsize * _OVERHEAD), available_bytes(device)
    if needed <= free:
        return
    place = "the GPU" if device.startswith("cuda") else "this machine"
    advice = "close other programs or take a smaller model (labkit models lists them)"
    if dtype.itemsize > 2:
        advice = f"ask for half of it with dtype='bfloat16', {advice}"
    raise NotEnoughMemoryError(
        f"{name} in {str(dtype).removeprefix('torch.')} needs about {needed / GB:.1f} GB "
        f"({parameters / 1e6:,.0f} M parameters) and {place} has {free / GB:.1f} GB free; {advice}"
    )


def _read_int(path: str) -> int | None:
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):  # no such limit here, or "max"
        return None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether it says that there is too little memory.

    On a GPU torch has an error for it, but CUDA and its libraries, which allocate for themselves, have words alone, as
    a CPU has.
    """
    import torch

    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return any(words in str(error) for words in ("allocate memory", "out of memory", "ALLOC_FAILED"))
