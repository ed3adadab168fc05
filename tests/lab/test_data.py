"""The data of the examples: the same bytes each time, resumable, and apart from the global generator."""

import io
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import pytest
import torch
from torch import Tensor

from forewarn.lab import data
from forewarn.lab.data import TokenBatches

GENERATED = {
    "classification": lambda seed: data.classification(120, num_features=8, num_classes=3, seed=seed),
    "images": lambda seed: data.images(120, num_classes=3, seed=seed),
    "sequences": lambda seed: data.sequences(120, length=12, num_classes=3, seed=seed),
    "batches": lambda seed: next(TokenBatches(torch.arange(5000), batch_size=8, context=16, seed=seed)),
}

generated = pytest.mark.parametrize("generate", GENERATED.values(), ids=GENERATED.keys())
Generate = Callable[[int], tuple[Tensor, Tensor]]


def equal(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@generated
def test_a_seed_decides_the_data_whatever_the_global_generator_does(generate: Generate) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        first = generate(0)
        torch.manual_seed(2)
        assert equal(first, generate(0))
    assert not equal(first, generate(1))


@generated
def test_drawing_data_leaves_the_global_generator_alone(generate: Generate) -> None:
    before = torch.get_rng_state()
    generate(0)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", ["classification", "images", "sequences"])
def test_generated_classes_are_of_equal_size(name: str) -> None:
    _, labels = GENERATED[name](0)
    assert torch.bincount(labels).tolist() == [40, 40, 40]


def test_generated_samples_have_the_documented_shapes() -> None:
    assert GENERATED["classification"](0)[0].shape == (120, 8)
    assert GENERATED["images"](0)[0].shape == (120, 1, 16, 16)
    assert GENERATED["sequences"](0)[0].shape == (120, 12, 2)


def test_the_standard_library_is_the_same_text_each_time() -> None:
    text = data.stdlib_text()
    assert text.dtype == torch.uint8
    assert text.dim() == 1
    assert 1_000_000 <= len(text) <= 2_000_000
    assert torch.equal(text, data.stdlib_text())
    assert torch.equal(text[:5000], data.stdlib_text(max_bytes=5000))


def test_the_standard_library_leaves_out_its_tests_and_installed_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("b.py", "a.py", "notes.txt", "package/c.py", "test/d.py", "package/tests/e.py", "site-packages/f.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"<{path.stem}>")
    (tmp_path / "broken_link.py").symlink_to(tmp_path / "missing.py")
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(tmp_path)})
    assert bytes(data.stdlib_text().tolist()) == b"<a><b><c>"


def test_a_python_without_its_source_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(FileNotFoundError, match="use read_text"):
        data.stdlib_text()


def test_a_text_file_is_read_byte_by_byte(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes("é\r\n".encode())
    assert data.read_text(path).tolist() == [0xC3, 0xA9, 0x0D, 0x0A]


def test_a_missing_or_empty_file_is_explained(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no file"):
        data.read_text(tmp_path / "missing")
    (tmp_path / "empty").touch()
    with pytest.raises(ValueError, match="empty is empty"):
        data.read_text(tmp_path / "empty")


def test_a_split_keeps_every_token_once_and_in_order() -> None:
    training, validation = data.split(torch.arange(25), validation_share=0.1)
    assert len(validation) == 3
    assert torch.equal(torch.cat([training, validation]), torch.arange(25))
    with pytest.raises(ValueError, match="validation_share is 10"):
        data.split(torch.arange(25), validation_share=10)


def test_targets_are_the_inputs_one_token_later() -> None:
    inputs, targets = next(TokenBatches(torch.arange(1000), batch_size=4, context=16, seed=0))
    assert inputs.shape == targets.shape == (4, 16)
    assert inputs.dtype == targets.dtype == torch.int64
    assert torch.equal(targets, inputs + 1)


def test_batches_reach_both_ends_of_the_text() -> None:
    seen = torch.cat([targets for _, targets in islice(TokenBatches(torch.arange(8), 4, context=4, seed=0), 20)])
    assert set(seen.flatten().tolist()) == {1, 2, 3, 4, 5, 6, 7}


def test_a_resumed_source_gives_the_batches_that_would_have_come_next() -> None:
    text = data.stdlib_text(max_bytes=10_000)
    batches = TokenBatches(text, batch_size=4, context=16, seed=0)
    next(batches)
    file = io.BytesIO()
    torch.save(batches.state_dict(), file)
    expected = list(islice(batches, 3))

    file.seek(0)
    resumed = TokenBatches(text, batch_size=4, context=16, seed=99)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    assert all(equal(one, other) for one, other in zip(expected, islice(resumed, 3), strict=True))


def test_a_text_shorter_than_one_window_is_explained() -> None:
    TokenBatches(torch.arange(17), batch_size=1, context=16, seed=0)
    with pytest.raises(ValueError, match="16 tokens are too few for a context of 16: at least 17"):
        TokenBatches(torch.arange(16), batch_size=1, context=16, seed=0)
