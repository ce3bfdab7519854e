"""Damaged files, many of them: each opens and reads, or is refused by a typed error, quickly and in little memory."""

from __future__ import annotations

import json
import random
import struct
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from deepseek_flash.errors import CheckpointError, FormatError, UnsupportedModel
from deepseek_flash.loading.source import open_source
from tests.support import checkpoints

REFUSALS = (FormatError, UnsupportedModel, CheckpointError)
EXTREMES = (0, 1, 2**7, 2**8 - 1, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1)
SECONDS = 10.0
"""A file that takes longer hangs us; the sound one takes a few milliseconds."""


@pytest.fixture(scope="module")
def gguf_bytes(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = checkpoints.tiny_llama(tmp_path_factory.mktemp("fuzz") / "f", num_hidden_layers=1, hidden_size=32)
    return checkpoints.tiny_gguf(folder, folder / "m.gguf", "Q4_1").read_bytes()


@pytest.fixture(scope="module")
def safetensors_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("fuzz") / "m.safetensors"
    save_file({"model.a": torch.ones(3, 4), "model.b": torch.zeros(5, dtype=torch.bfloat16)}, path)
    return path.read_bytes()


class Trial:
    """Opens damaged contents; counts what opened and what was refused."""

    def __init__(self, path: Path, target: Path, size: int) -> None:
        self.path, self.target = path, target
        self.most = 64 * size + (32 << 20)
        """Bytes that Python may allocate: a header of one-byte values takes tens of bytes each as objects."""
        self.opened = self.refused = 0

    def __call__(self, content: bytes, note: str) -> None:
        self.path.write_bytes(content)
        tracemalloc.reset_peak()
        start = time.perf_counter()
        try:
            with open_source(self.target) as source:
                for name in source.names():
                    tensor = source.tensor(name)
                    assert tuple(tensor.shape) == source.shape(name), note
                    assert tensor.numel() <= 32 * len(content), note
                source.fingerprint()
            self.opened += 1
        except REFUSALS as e:
            if str(self.path.parent) not in str(e) and "tensor" not in str(e):
                pytest.fail(f"{note}: the error names neither file nor tensor: {e}")
            self.refused += 1
        except BaseException as e:
            pytest.fail(f"{note}: {type(e).__name__}: {e}")
        assert time.perf_counter() - start < SECONDS, note
        assert tracemalloc.get_traced_memory()[1] < self.most, note


@pytest.fixture
def gguf_trial(tmp_path: Path, gguf_bytes: bytes) -> Iterator[Trial]:
    path = tmp_path / "m.gguf"
    tracemalloc.start()
    yield Trial(path, path, len(gguf_bytes))
    tracemalloc.stop()


@pytest.fixture
def safetensors_trial(tmp_path: Path, safetensors_bytes: bytes) -> Iterator[Trial]:
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 1}))
    tracemalloc.start()
    yield Trial(tmp_path / "model.safetensors", tmp_path, len(safetensors_bytes))
    tracemalloc.stop()


def header_size(content: bytes) -> int:
    """Where the tensor data of our test GGUF starts, by its own table."""
    at = content.index(b"output_norm.weight")
    return (at // 32 + 4) * 32


def flipped(content: bytes, rng: random.Random, most: int, within: int) -> bytes:
    out = bytearray(content)
    for _ in range(rng.randint(1, most)):
        out[rng.randrange(within)] ^= 1 << rng.randrange(8)
    return bytes(out)


def scribbled(content: bytes, rng: random.Random, within: int) -> bytes:
    """A u32 or u64 somewhere becomes an extreme value."""
    width = rng.choice((4, 8))
    value = rng.choice(EXTREMES) % (1 << (8 * width))
    at = rng.randrange(within - width)
    return content[:at] + value.to_bytes(width, "little") + content[at + width :]


def spliced(content: bytes, rng: random.Random, within: int) -> bytes:
    """A piece is cut out, doubled, or replaced by noise."""
    a, b = sorted(rng.sample(range(within), 2))
    b = min(b, a + 64)
    middle = rng.choice((b"", content[a:b] * 2, rng.randbytes(b - a)))
    return content[:a] + middle + content[b:]


def test_the_sound_files_open(
    gguf_trial: Trial, gguf_bytes: bytes, safetensors_trial: Trial, safetensors_bytes: bytes
) -> None:
    """Else the fuzzing below would prove nothing."""
    gguf_trial(gguf_bytes, "sound gguf")
    safetensors_trial(safetensors_bytes, "sound safetensors")
    assert gguf_trial.opened == safetensors_trial.opened == 1


def test_gguf_truncations(gguf_trial: Trial, gguf_bytes: bytes) -> None:
    size = len(gguf_bytes)
    cuts = {*range(64), *range(64, header_size(gguf_bytes), 61), *range(header_size(gguf_bytes), size, 997), size - 1}
    for cut in sorted(cuts):
        gguf_trial(gguf_bytes[:cut], f"cut at {cut}")
    assert gguf_trial.opened == 0


def fields(content: bytes) -> list[tuple[int, int]]:
    """(offset, width) of every number in the header of a GGUF file: counts, lengths, types, dimensions, offsets."""
    out = [(4, 4), (8, 8), (16, 8)]
    pos = 24
    widths = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}

    def number(width: int) -> int:
        nonlocal pos
        out.append((pos, width))
        pos += width
        return int.from_bytes(content[pos - width : pos], "little")

    def string() -> None:
        nonlocal pos
        length = number(8)
        pos += length

    tensors, pairs = struct.unpack_from("<QQ", content, 8)
    for _ in range(pairs):
        string()
        kind = number(4)
        inner, count = (number(4), number(8)) if kind == 9 else (kind, 1)
        for i in range(count):
            if inner == 8:
                string()
            elif i < 3:
                number(widths[inner])
            else:
                pos += widths[inner]
    for _ in range(tensors):
        string()
        dims = number(4)
        for _ in range(dims):
            number(8)
        number(4)
        number(8)
    return out


def test_gguf_extreme_values_in_every_field(gguf_trial: Trial, gguf_bytes: bytes) -> None:
    rng = random.Random(1)
    every = fields(gguf_bytes)
    few = [f for f in every if f[1] > 1]
    table = few[-60:]  # the tensor table, and what comes before the vocabulary
    for at, width in few[:40] + rng.sample(few, 30) + table:
        for value in rng.sample(EXTREMES, 3):
            bad = gguf_bytes[:at] + (value % (1 << 8 * width)).to_bytes(width, "little") + gguf_bytes[at + width :]
            gguf_trial(bad, f"{value} at {at}, {width} bytes")
    assert gguf_trial.refused > gguf_trial.opened


Damage = Callable[[bytes, random.Random, int], bytes]
DAMAGES: dict[str, Damage] = {
    "flips": lambda c, r, w: flipped(c, r, 8, w),
    "extremes": scribbled,
    "splices": spliced,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_gguf_random_damage(damage: str, gguf_trial: Trial, gguf_bytes: bytes) -> None:
    rng = random.Random(2)
    for i in range(100):
        gguf_trial(DAMAGES[damage](gguf_bytes, rng, header_size(gguf_bytes)), f"{damage} {i}")
    assert gguf_trial.refused > 10


@pytest.mark.parametrize("damage", DAMAGES)
def test_safetensors_random_damage(damage: str, safetensors_trial: Trial, safetensors_bytes: bytes) -> None:
    rng = random.Random(3)
    for i in range(150):
        safetensors_trial(DAMAGES[damage](safetensors_bytes, rng, len(safetensors_bytes) - 8), f"{damage} {i}")
    assert safetensors_trial.refused > 10


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_much_more_damage(
    seed: int, gguf_trial: Trial, gguf_bytes: bytes, safetensors_trial: Trial, safetensors_bytes: bytes
) -> None:
    rng = random.Random(100 + seed)
    for i in range(1500):
        damage = rng.choice(sorted(DAMAGES))
        gguf_trial(DAMAGES[damage](gguf_bytes, rng, header_size(gguf_bytes)), f"seed {seed}, {damage} {i}")
        safetensors_trial(
            DAMAGES[damage](safetensors_bytes, rng, len(safetensors_bytes) - 8), f"seed {seed}, {damage} {i}"
        )
    assert gguf_trial.refused > 100 < safetensors_trial.refused


def test_a_big_header_of_tiny_values_stays_in_proportion(tmp_path: Path) -> None:
    """A hundred thousand empty strings: 8 bytes each in the file, one shared object in memory."""
    count = 100_000
    key = struct.pack("<Q", 1) + b"k" + struct.pack("<IIQ", 9, 8, count)
    content = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + key + b"\0" * (8 * count)
    path = tmp_path / "m.gguf"
    tracemalloc.start()
    try:
        Trial(path, path, len(content))(content, "many empty strings")
        assert tracemalloc.get_traced_memory()[1] < 6 * len(content)
    finally:
        tracemalloc.stop()
