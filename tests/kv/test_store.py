"""The bytes of the cache: views, copies, and memory that comes late and goes at once."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import pytest
import torch

from deepseek_flash.errors import InternalError, MemoryBudgetError
from deepseek_flash.kv.blocks import BlockCopy
from deepseek_flash.kv.spec import CacheSpec, Field, Group
from deepseek_flash.kv.store import KVStore

SPEC = CacheSpec(
    8,
    (
        Group("kv", "rows", tuple(Field(n, i, (2, 5), "float32") for i in range(3) for n in "kv")),
        Group("slow", "rows", (Field("row", 1, (3,), "float16"), Field("scale", 1, (), "float32")), ratio=4),
        Group("window", "window", (Field("k", 0, (7,), "bfloat16"),), window=20),
        Group("state", "state", (Field("pending", 2, (4, 3), "float32"), Field("ids", 2, (3,), "int64"))),
    ),
)


def test_views_have_the_declared_shapes_and_do_not_overlap() -> None:
    store = KVStore(SPEC, (5, 4, 3, 2), "cpu")
    assert store.view(0, 2, "v").shape == (5, 8, 2, 5)
    assert store.view(1, 1, "row").shape == (4, 2, 3)
    assert store.view(1, 1, "row").dtype == torch.float16
    assert store.view(1, 1, "scale").shape == (4, 2)
    assert store.view(2, 0, "k").shape == (3, 8, 7)
    assert store.view(3, 2, "ids").shape == (2, 1, 3)
    fields = [(g, f) for g, group in enumerate(SPEC.groups) for f in group.fields]
    for i, (g, f) in enumerate(fields, 1):
        store.view(g, f.layer, f.name).fill_(i)
    for i, (g, f) in enumerate(fields, 1):
        assert torch.all(store.view(g, f.layer, f.name) == i)


def test_a_block_is_one_run_of_bytes_with_every_field_inside() -> None:
    store = KVStore(SPEC, (5, 4, 3, 2), "cpu")
    for field in SPEC.groups[0].fields:
        store.view(0, field.layer, field.name)[3] = 1.5
    written = store.pools[0].view(torch.float32)
    assert torch.count_nonzero(written[3]) == 3 * 2 * 8 * 2 * 5
    assert torch.count_nonzero(written[[0, 1, 2, 4]]) == 0
    assert store.nbytes == sum(p.numel() for p in store.pools)


def test_zero_comes_before_copies_and_copies_in_order() -> None:
    store = KVStore(SPEC, (4, 1, 1, 2), "cpu")
    view = store.view(0, 0, "k")
    for block in range(4):
        view[block] = block + 1
    store.view(3, 2, "pending").fill_(9)
    store.apply([(0, 0), (3, 1)], [BlockCopy(0, 0, 1), BlockCopy(0, 1, 2), BlockCopy(0, 3, 0)])
    assert view[:, 0, 0, 0].tolist() == [4, 0, 0, 4]
    assert store.view(3, 2, "pending")[:, 0, 0, 0].tolist() == [9, 0]


def test_orders_of_a_block_are_the_same_rows_elsewhere() -> None:
    fields = [Field(o, 0, (2, 5), "float32", o) for o in ("rows", "heads", "turned")]
    store = KVStore(CacheSpec(4, (Group("kv", "rows", tuple(fields)),)), (3,), "cpu")
    rows = torch.arange(3 * 4 * 2 * 5, dtype=torch.float32).view(3, 4, 2, 5)
    want = {"rows": rows, "heads": rows.transpose(1, 2), "turned": rows.permute(0, 2, 3, 1)}
    for f in fields:
        view = store.view(0, 0, f.name)
        assert view.shape == rows.shape
        view.copy_(rows)
    flat = store.pools[0].view(torch.float32)
    for f, offset in zip(fields, store.spec.groups[0].field_offsets(4), strict=True):
        part = flat[:, offset // 4 : offset // 4 + 40]
        assert torch.equal(part, want[f.name].reshape(3, 40)), f.name
        assert torch.equal(store.view(0, 0, f.name), rows), f.name
    digests = {
        CacheSpec(4, (Group("kv", "rows", (Field("k", 0, (2, 5), "float32", f.order),)),)).digest() for f in fields
    }
    assert len(digests) == 3, "a cache written in one order must not be read in another"


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/statm")
def test_memory_is_taken_when_written_and_given_back_on_close() -> None:
    spec = CacheSpec(16, (Group("kv", "rows", (Field("k", 0, (1024,), "float32"),)),))
    gc.collect()
    before = _resident()
    store = KVStore(spec, (4096,), "cpu")
    assert store.nbytes == 256 << 20
    assert _resident() - before < 16 << 20
    view = store.view(0, 0, "k")
    view[:2048] = 1
    assert _resident() - before > 100 << 20
    store.close()
    assert _resident() - before < 32 << 20, "a view that somebody still holds must not keep the memory"
    assert view.shape == (4096, 16, 1024)
    store.close()


def test_torch_memory_is_given_back_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Systems without private anonymous mappings."""
    monkeypatch.delattr("mmap.MAP_PRIVATE", raising=False)
    store = KVStore(SPEC, (4, 1, 1, 2), "cpu")
    view = store.view(0, 0, "k")
    assert torch.count_nonzero(view) == 0
    store.close()
    assert view.untyped_storage().nbytes() == 0


def test_more_than_there_is_is_a_memory_error() -> None:
    with pytest.raises(MemoryBudgetError, match="lower max_model_len") as e:
        KVStore(SPEC, (1 << 40, 1, 1, 1), "cpu")
    assert e.value.needed > 1 << 50


def test_misuse_is_an_internal_error() -> None:
    with pytest.raises(InternalError, match="4 cache groups"):
        KVStore(SPEC, (1, 2), "cpu")
    with pytest.raises(InternalError, match="tpu"):
        KVStore(SPEC, (1, 1, 1, 1), "tpu")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/statm")
def test_discarded_blocks_give_their_memory_back_and_no_others() -> None:
    spec = CacheSpec(16, (Group("kv", "rows", (Field("k", 0, (1024,), "float32"),)),))  # a block: 64 KiB
    store = KVStore(spec, (2048,), "cpu")
    view = store.view(0, 0, "k")
    view[:] = torch.arange(2048, dtype=torch.float32)[:, None, None]
    full = _resident()
    gone = [*range(100, 1100), 1500, 1502, 2047]
    store.discard(0, gone)
    assert full - _resident() > 60 << 20
    kept = [b for b in range(2048) if b not in set(gone)]
    assert torch.equal(view[kept, 5, 7], torch.tensor(kept, dtype=torch.float32))
    assert torch.count_nonzero(view[gone]) == 0
    view[100] = 3
    assert float(view[100].sum()) == 3 * 16 * 1024
    store.close()


def test_blocks_smaller_than_a_page_take_no_neighbour_along() -> None:
    spec = CacheSpec(4, (Group("kv", "rows", (Field("k", 0, (100,), "float32"),)),))  # a block: 1600 bytes
    store = KVStore(spec, (64,), "cpu")
    view = store.view(0, 0, "k")
    view[:] = 7
    gone = [3, *range(10, 40), 63]
    store.discard(0, gone)
    kept = [b for b in range(64) if b not in set(gone)]
    assert torch.all(view[kept] == 7)
    store.close()


def test_an_image_of_some_blocks_brings_them_back(tmp_path: Path) -> None:
    store = KVStore(SPEC, (5, 4, 3, 2), "cpu")
    rng = torch.Generator().manual_seed(1)
    for pool in store.pools:
        pool.copy_(torch.randint(0, 255, pool.shape, generator=rng, dtype=torch.uint8))
    before = [pool.clone() for pool in store.pools]
    kept = [[0, 3], [], [1, 2], [1]]
    with (tmp_path / "image").open("w+b") as file:
        store.save(file, kept)
        for pool in store.pools:
            pool.zero_()
        file.seek(0)
        store.load(file, kept)
        file.seek(0)
        file.truncate(100)
        with pytest.raises(InternalError, match="ended early"):
            store.load(file, kept)
    for g, blocks in enumerate(kept[:1] + kept[1:]):
        assert torch.equal(store.pools[g][blocks], before[g][blocks])
