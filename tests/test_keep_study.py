"""A study that was packed gives the same report; weights and checkpoints stay behind."""

import tarfile

import pytest

from labkit.bench.effect_report import report
from scripts.keep_study import pack
from tests.test_bench_mask_effect import made_up

pytestmark = pytest.mark.end_to_end


def test_a_packed_study_gives_the_same_report_and_holds_no_weights(tmp_path):
    folder = made_up(tmp_path / "s", {"causal": 60.0, "bidirectional": 72.0}, n=60)
    run = next(folder.glob("runs/*/*/*/*"))
    (run / "checkpoints" / "checkpoint-1").mkdir(parents=True)
    (run / "checkpoints" / "checkpoint-1" / "trainer_state.json").write_text("{}")
    (run / "model").mkdir()
    (run / "model" / "config.json").write_text("{}")
    (run / "model.safetensors").write_bytes(b"weights")
    first = tmp_path / "kept" / "s.tar.xz"
    assert pack(folder, first) == 2 + 10 * 3
    with tarfile.open(first) as archive:
        assert all(name.startswith("s/") for name in archive.getnames())
        archive.extractall(tmp_path / "again", filter="data")
    assert report([tmp_path / "again" / "s"]) == report([folder])
    pack(folder, tmp_path / "s.tar.xz")
    assert (tmp_path / "s.tar.xz").read_bytes() == first.read_bytes()


def test_a_folder_without_a_study_is_refused(tmp_path):
    with pytest.raises(SystemExit, match="holds no study"):
        pack(tmp_path, tmp_path / "s.tar.xz")
    assert not (tmp_path / "s.tar.xz").exists()
