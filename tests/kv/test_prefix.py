"""PrefixIndex: what a key depends on, and that entries live and die with their blocks."""

from __future__ import annotations

import subprocess
import sys

import pytest

from deepseek_flash.errors import InternalError
from deepseek_flash.kv.prefix import NONE, PrefixIndex
from tests.kv.toys import rows_spec, toy_spec

TOKENS = [5, 6, 7, 8, 9, 10, 11, 12, 13]


def keys(tokens: list[int], *, root: bytes = b"r", salt: bytes = b"", count: int = 2) -> list[bytes]:
    out: list[bytes] = []
    PrefixIndex(rows_spec(), root).extend_keys(out, tokens, salt, count)
    return out


def test_a_key_names_all_tokens_up_to_the_end_of_its_block() -> None:
    base = keys(TOKENS)
    assert keys([*TOKENS[:8], 99]) == base, "tokens behind a block do not matter"
    for i in range(8):
        changed = list(TOKENS)
        changed[i] += 1
        other = keys(changed)
        assert other[1] != base[1]
        assert (other[0] == base[0]) == (i >= 4)
    assert len(set(keys([1] * 16, count=4))) == 4, "equal blocks at other places have other keys"


def test_T05_K08_salt_weights_and_layout_separate_keys() -> None:
    """T05: another salt, other weights or another layout never share a block."""
    base = keys(TOKENS)[0]
    assert keys(TOKENS, salt=b"a")[0] != base
    assert keys(TOKENS, root=b"s")[0] != base
    assert keys(TOKENS, salt=b"a")[0] != keys(TOKENS, salt=b"b")[0]
    assert keys(TOKENS, root=b"ra")[0] != keys(TOKENS, root=b"r", salt=b"a")[0]
    assert rows_spec(4).digest() != rows_spec(8).digest() != toy_spec().digest()


def test_large_token_ids_are_told_apart() -> None:
    assert keys([2**16 + 1] * 8) != keys([1] * 8)
    assert keys([2**32 - 1] * 8) != keys([2**31 - 1] * 8)


def test_keys_are_extended_not_computed_again() -> None:
    index = PrefixIndex(rows_spec(), b"r")
    out: list[bytes] = []
    index.extend_keys(out, TOKENS, b"", 1)
    first = list(out)
    index.extend_keys(out, TOKENS, b"", 2)
    assert out[:1] == first
    assert out == keys(TOKENS)
    index.extend_keys(out, [0] * 8, b"", 2)
    assert out == keys(TOKENS)


def test_K07_keys_do_not_depend_on_the_hash_seed() -> None:
    """K07: another process with another PYTHONHASHSEED computes the same keys."""
    code = (
        "from deepseek_flash.kv.prefix import PrefixIndex\n"
        "from deepseek_flash.kv.spec import CacheSpec, Field, Group\n"
        "spec = CacheSpec(4, (Group('kv', 'rows', (Field('x', 0, (4,), 'float32'),)),))\n"
        "keys = []\n"
        "PrefixIndex(spec, b'r' + spec.digest()).extend_keys(keys, [5, 6, 7, 8], b'salt', 1)\n"
        "import sys; sys.stdout.write(keys[0].hex())"
    )
    runs = [
        subprocess.run([sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, check=True)
        for seed in ("0", "12345")
    ]
    assert runs[0].stdout == runs[1].stdout
    assert (
        runs[0].stdout.decode() == keys([5, 6, 7, 8], root=b"r" + rows_spec().digest(), salt=b"salt", count=1)[0].hex()
    )


def test_reach_is_the_longest_run_of_blocks_with_rows_in_every_group() -> None:
    index = PrefixIndex(toy_spec(), b"r")
    chain: list[bytes] = []
    index.extend_keys(chain, list(range(24)), b"", 6)
    for depth in range(5):
        index.put(chain, depth, 0, depth)
    for depth in range(3):
        index.put(chain, depth, 1, depth)
    assert [index.reach(chain, limit) for limit in range(7)] == [0, 1, 2, 3, 3, 3, 3]
    assert index.reach([b"?"] * 6, 6) == 0


def test_dropping_rows_takes_the_entry_along_dropping_window_or_state_does_not() -> None:
    index = PrefixIndex(toy_spec(), b"r")
    chain: list[bytes] = []
    index.extend_keys(chain, [1, 2, 3, 4], b"", 1)
    for group, block in enumerate((7, 5, 3, 2)):
        index.put(chain, 0, group, block)
    index.check()
    assert index.drop(2, 3) == []
    assert index.get(chain[0], 2) == NONE
    assert index.drop(0, 7) == [(1, 5), (3, 2)]
    assert len(index) == 0
    assert [index.blocks(g) for g in range(4)] == [[], [], [], []]
    index.check()


def test_check_notices_orphans_and_broken_links() -> None:
    index = PrefixIndex(rows_spec(), b"r")
    chain: list[bytes] = []
    index.extend_keys(chain, list(range(8)), b"", 2)
    index.put(chain, 0, 0, 0)
    index.put(chain, 1, 0, 1)
    with pytest.raises(InternalError, match="published already"):
        index.put(chain, 1, 0, 2)
    index.check()
    index.drop(0, 0)
    with pytest.raises(InternalError, match="outlived"):
        index.check()
    index.drop(0, 1)
    index.put(chain, 0, 0, 0)
    index._entries[chain[0]].blocks[0] = 3
    with pytest.raises(InternalError, match="point back"):
        index.check()
