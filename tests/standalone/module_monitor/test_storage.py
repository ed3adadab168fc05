"""Metrics by step and as HDF5 files."""

import h5py
import numpy as np
import pytest

from forewarn import StorageManager

STEPS = {
    0: {"gradient/0.weight/norm": 1.5, "loss": 2.0, "gradient/0.weight": -1.0},
    20: {"gradient/0.weight/norm": 0.1, "loss": float("nan")},
    40: {"a//b/./../keys/values": 3.0, "%/keys": 4.0, "": 5.0, "RCC (W_t-W_0)x_t/ü/l2norm": 6.0},
}


def by_metric(steps):
    return {
        name: {step: steps[step][name] for step in steps if name in steps[step]}
        for step in steps
        for name in steps[step]
    }


@pytest.fixture
def storage():
    storage = StorageManager()
    storage.load_metrics(STEPS)
    return storage


@pytest.mark.parametrize("condensed", [True, False])
def test_names_with_slashes_survive_the_round_trip_either_way(storage, tmp_path, condensed):
    path = tmp_path / "metrics.h5"
    storage.save_hdf5(path, condensed=condensed)
    loaded = StorageManager.load_hdf5(path)
    np.testing.assert_equal(loaded, by_metric(STEPS))
    assert all(isinstance(step, int) for steps in loaded.values() for step in steps)


def test_entries_can_be_read_one_by_one(storage, tmp_path):
    path = str(tmp_path / "metrics.h5")
    storage.save_hdf5(path)
    assert set(StorageManager.read_hdf5_entry_keys(path)) == set(by_metric(STEPS))
    keys, values = storage.read_hdf5_entry(path, "gradient/0.weight/norm")
    assert keys.tolist() == [0, 20]
    assert values.tolist() == [1.5, 0.1]
    assert storage.read_hdf5_entry(path, "gradient") is None
    assert storage.read_hdf5_entry(path, "no such metric") is None
    storage.save_hdf5(path, condensed=False)
    assert set(StorageManager.read_hdf5_entry_keys(path)) == {"0", "20", "40"}
    keys, values = storage.read_hdf5_entry(path, 0)
    assert dict(zip(keys, values, strict=True)) == STEPS[0]


def test_a_file_can_be_read_by_path_without_this_package(storage, tmp_path):
    storage.save_hdf5(tmp_path / "metrics.h5")
    with h5py.File(tmp_path / "metrics.h5") as file:
        assert file["gradient/0.weight/norm/values"][()].tolist() == [1.5, 0.1]


def test_a_file_of_the_public_package_can_be_read(tmp_path):
    public = pytest.importorskip("torch_module_monitor").StorageManager()
    public.load_metrics({step: {"gradient/0.weight/norm": 1.0 + step, "loss": 2.0} for step in (0, 20)})
    public.save_hdf5(str(tmp_path / "metrics.h5"))
    assert StorageManager.load_hdf5(tmp_path / "metrics.h5") == {
        "gradient/0.weight/norm": {0: 1.0, 20: 21.0}, "loss": {0: 2.0, 20: 2.0},
    }  # fmt: skip


def test_steps_can_be_asked_for_loaded_and_cleared(storage):
    assert storage.has_step(20)
    assert not storage.has_step(1)
    assert storage.get_step_metrics(1) == {}
    assert storage.get_step_metrics(0)["loss"] == 2.0
    assert storage.get_all_metrics() is STEPS
    assert storage.condensed_log_dict()["gradient/0.weight/norm"] == {0: 1.5, 20: 0.1}
    with pytest.raises(ValueError, match=r"call clear\(\)"):
        storage.load_metrics({})
    storage.clear()
    assert storage.get_all_metrics() == {}
    storage.log_scalar(3, "loss", np.float32(0.5))
    assert storage.get_step_metrics(3) == {"loss": 0.5}
    with pytest.raises(ValueError, match="takes a number for 'loss'"):
        storage.log_scalar(3, "loss", "half")
