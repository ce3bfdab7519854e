"""The disk store's index: which record of which segment holds which block. One sqlite file, shared by processes.

Everything here can be made again from the segments; a damaged index is thrown away. A record is entered before its
bytes are written, as pending, so that space is reserved under the bound and a crash leaves a note of what is torn.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from deepseek_flash.kv.records import KINDS, Header

VERSION = 1
NAME = "index.sqlite3"
_PAGE = 500
"""Keys of one query: sqlite allows 999 variables."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS segments (id INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT UNIQUE, owner TEXT);
CREATE TABLE IF NOT EXISTS records (
    id INTEGER PRIMARY KEY AUTOINCREMENT, segment INTEGER, offset INTEGER, length INTEGER, kind INTEGER,
    identity BLOB, parent BLOB, depth INTEGER, blocks INTEGER, block_bytes INTEGER, cost REAL, created REAL, used REAL,
    hits INTEGER, children INTEGER, pinned INTEGER, owner TEXT);
CREATE INDEX IF NOT EXISTS records_parent ON records (parent, identity);
CREATE INDEX IF NOT EXISTS records_segment ON records (segment);
CREATE TABLE IF NOT EXISTS blocks (
    identity BLOB, kind INTEGER, key BLOB, record INTEGER, position INTEGER,
    PRIMARY KEY (identity, kind, key)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS blocks_record ON blocks (record);
CREATE TABLE IF NOT EXISTS pins (name TEXT, key BLOB, PRIMARY KEY (name, key)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS pins_key ON pins (key);
"""


class NewerIndex(sqlite3.NotSupportedError):
    """Written by a later version: not damaged, and not to be thrown away."""


@dataclass(frozen=True, slots=True)
class Row:
    """Where a record is."""

    id: int
    segment: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Found:
    """One block in the index."""

    row: Row
    blocks: int
    block_bytes: int
    position: int


def salvaged_pins(path: Path) -> dict[str, list[bytes]]:
    """Pins of a damaged index, as far as they can be read: all else can be made again from the segments."""
    pins: dict[str, list[bytes]] = {}
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=rw", uri=True)) as db:
            for name, key in db.execute("SELECT name, key FROM pins"):
                if isinstance(name, str) and isinstance(key, bytes):
                    pins.setdefault(name, []).append(key)
    except (sqlite3.Error, OSError, ValueError):
        pass  # what was read before it broke is kept
    return pins


class DiskIndex:
    """Not thread-safe: the store's lock is held around every call. Methods raise ``sqlite3.Error``."""

    def __init__(self, folder: Path, busy_seconds: float = 5.0) -> None:
        self.path = folder / NAME
        self._db = sqlite3.connect(self.path, timeout=busy_seconds, isolation_level=None, check_same_thread=False)
        try:
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=NORMAL")
            self._db.execute("PRAGMA wal_autocheckpoint=64")
            self._db.execute("PRAGMA journal_size_limit=1048576")
            self._db.executescript(f"BEGIN IMMEDIATE;{_SCHEMA}COMMIT;")
            known = self._db.execute("SELECT value FROM meta WHERE name='version'").fetchone()
            if known is None:
                with self.transaction():
                    self._db.execute("INSERT OR IGNORE INTO meta VALUES ('version', ?)", (VERSION,))
                    self._db.execute("INSERT OR IGNORE INTO meta VALUES ('bytes', 0)")
            elif isinstance(known[0], int) and known[0] > VERSION:
                raise NewerIndex(
                    f"the folder was written by a newer deepseek-flash (format {known[0]}, known up to {VERSION}); "
                    "clear it or give the cache another folder"
                )
            elif known[0] != VERSION:
                raise sqlite3.DatabaseError(f"index version {known[0]}, not {VERSION}")
        except BaseException:
            self._db.close()
            raise
        self.inode = self.path.stat().st_ino

    def close(self) -> None:
        self._db.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All of it or nothing; other processes that write wait."""
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    # ---- space

    def used_bytes(self) -> int:
        """Bytes of all records, pending ones included."""
        found = self._db.execute("SELECT value FROM meta WHERE name='bytes'").fetchone()
        if found is None or not isinstance(found[0], int):
            raise sqlite3.DatabaseError("the index is damaged: it does not know its size")
        return found[0]

    def count_bytes(self) -> None:
        """Add up what records take, in case the sum that is kept is wrong."""
        self._db.execute("UPDATE meta SET value = (SELECT COALESCE(SUM(length), 0) FROM records) WHERE name='bytes'")

    def _add_bytes(self, n: int) -> None:
        self._db.execute("UPDATE meta SET value = value + ? WHERE name='bytes'", (n,))

    # ---- segments

    def add_segment(self, name: str, owner: str) -> int:
        cursor = self._db.execute("INSERT INTO segments (name, owner) VALUES (?, ?)", (name, owner))
        return int(cursor.lastrowid or 0)

    def segments(self) -> list[tuple[int, str, str, int]]:
        """(id, name, owner, records) of each."""
        return self._db.execute(
            "SELECT s.id, s.name, s.owner, COUNT(r.id) FROM segments s LEFT JOIN records r ON r.segment = s.id "
            "GROUP BY s.id"
        ).fetchall()

    def has_segment(self, segment: int) -> bool:
        return bool(self._one("SELECT COUNT(*) FROM segments WHERE id = ?", (segment,)))

    def pending_in(self, segment: int) -> list[tuple[int, str]]:
        """(record, owner) of a segment's records that cannot be found."""
        return self._db.execute(
            "SELECT id, owner FROM records WHERE segment = ? AND owner != ''", (segment,)
        ).fetchall()

    def whole_in(self, segment: int) -> int:
        """How many records of a segment can be found."""
        return self._one("SELECT COUNT(*) FROM records WHERE segment = ? AND owner = ''", (segment,))

    def records_in(self, segment: int) -> list[int]:
        return [r for (r,) in self._db.execute("SELECT id FROM records WHERE segment = ?", (segment,))]

    def remove_segment(self, segment: int) -> None:
        self._db.execute("DELETE FROM segments WHERE id = ?", (segment,))

    # ---- records

    def insert(self, header: Header, segment: int, offset: int, owner: str, hits: int = 0) -> int:
        """A pending record: it takes space and is not found yet."""
        kind = KINDS.index(header.kind)
        cursor = self._db.execute(
            "INSERT INTO records (segment, offset, length, kind, identity, parent, depth, blocks, block_bytes, cost, "
            "created, used, hits, children, pinned, owner) VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?,0,0,?)",
            (segment, offset, header.length, kind, header.identity, header.parent, header.depth, len(header.keys),
             header.block_bytes, header.cost, header.created, header.created, hits, owner),
        )  # fmt: skip
        self._add_bytes(header.length)
        return int(cursor.lastrowid or 0)

    def publish(self, record: int, header: Header) -> bool:
        """A pending record is whole: let it be found. False when somebody cleared it away in the meantime."""
        kind = KINDS.index(header.kind)
        if not self._one("SELECT COUNT(*) FROM records WHERE id = ?", (record,)):
            return False
        self._db.executemany(
            "INSERT OR IGNORE INTO blocks VALUES (?,?,?,?,?)",
            [(header.identity, kind, key, record, i) for i, key in enumerate(header.keys)],
        )
        children = pinned = 0
        for part in _parts(header.keys):
            marks = ",".join("?" * len(part))
            children += self._one(
                f"SELECT COUNT(*) FROM records WHERE identity = ? AND owner = '' AND id != ? AND parent IN ({marks})",
                (header.identity, record, *part),
            )
            pinned += self._one(f"SELECT COUNT(*) FROM pins WHERE key IN ({marks})", part)
        self._db.execute(
            "UPDATE records SET owner = '', children = ?, pinned = ? WHERE id = ?", (children, int(pinned > 0), record)
        )
        self._count_child(header.identity, header.parent, record, 1)
        return True

    def _count_child(self, identity: bytes, parent: bytes, record: int, by: int) -> None:
        self._db.execute(
            "UPDATE records SET children = children + ? WHERE id != ? AND id IN "
            "(SELECT record FROM blocks WHERE identity = ? AND kind = 0 AND key = ?)",
            (by, record, identity, parent),
        )

    def retire(self, record: int, owner: str) -> Row | None:
        """No longer found, but still taking space, until ``remove``; where it is."""
        found = self._db.execute(
            "SELECT r.id, s.name, r.offset, r.length, r.identity, r.parent, r.owner FROM records r "
            "JOIN segments s ON s.id = r.segment WHERE r.id = ?",
            (record,),
        ).fetchone()
        if found is None:
            return None
        if not found[6]:
            self._count_child(found[4], found[5], record, -1)
            self._db.execute("DELETE FROM blocks WHERE record = ?", (record,))
        self._db.execute("UPDATE records SET owner = ? WHERE id = ?", (owner, record))
        return Row(*found[:4])

    def remove(self, rows: Iterable[Row]) -> None:
        """Retired records' space is free again."""
        for row in rows:
            gone = self._db.execute("DELETE FROM records WHERE id = ?", (row.id,)).rowcount
            self._add_bytes(-row.length * gone)

    def lookup(self, identity: bytes, kind: int, keys: Sequence[bytes]) -> dict[bytes, Found]:
        """Blocks of whole records."""
        found: dict[bytes, Found] = {}
        for part in _parts(keys):
            marks = ",".join("?" * len(part))
            for key, position, *row, blocks, block_bytes in self._db.execute(
                "SELECT b.key, b.position, r.id, s.name, r.offset, r.length, r.blocks, r.block_bytes FROM blocks b "
                "JOIN records r ON r.id = b.record JOIN segments s ON s.id = r.segment "
                f"WHERE b.identity = ? AND b.kind = ? AND b.key IN ({marks})",
                (identity, kind, *part),
            ):
                found[key] = Found(Row(*row), blocks, block_bytes, position)
        return found

    def records_with(self, identity: bytes | None, keys: Sequence[bytes]) -> set[int]:
        """Ids of records that hold any of these keys."""
        found: set[int] = set()
        for part in _parts(keys):
            marks = ",".join("?" * len(part))
            query = f"SELECT record FROM blocks WHERE key IN ({marks})"
            args: tuple[bytes, ...] = tuple(part)
            if identity is not None:
                query, args = f"{query} AND identity = ?", (*args, identity)
            found.update(r for (r,) in self._db.execute(query, args))
        return found

    def pending(self) -> list[tuple[int, str]]:
        """(record, owner) of those not published."""
        return self._db.execute("SELECT id, owner FROM records WHERE owner != ''").fetchall()

    def victims(self, now: float, half_life: float, most: int) -> list[tuple[int, int]]:
        """(record, length) of what is worth least: seconds that it saves a byte, by hits and by time unused.

        Only records that nothing continues, and that are not pinned. A clock that went backwards counts as no time.
        """
        return self._db.execute(
            "SELECT id, length FROM records WHERE owner = '' AND children <= 0 AND pinned = 0 "
            "ORDER BY (hits + 1) * max(cost, 1e-9) / length / (1 + max(0, ? - used) / ?), used LIMIT ?",
            (now, half_life, most),
        ).fetchall()

    def touch(self, hits: Iterable[tuple[int, int]], now: float) -> None:
        """(record, times)."""
        self._db.executemany(
            "UPDATE records SET hits = hits + ?, used = max(used, ?) WHERE id = ?", [(n, now, r) for r, n in hits]
        )

    def all(self) -> list[tuple[int, ...]]:
        """Of whole records: id, segment's name, offset, length, kind, identity, depth, blocks, block bytes, cost,
        created, used, hits, pinned."""
        return self._db.execute(
            "SELECT r.id, s.name, r.offset, r.length, r.kind, r.identity, r.depth, r.blocks, r.block_bytes, r.cost, "
            "r.created, r.used, r.hits, r.pinned FROM records r JOIN segments s ON s.id = r.segment "
            "WHERE r.owner = '' ORDER BY r.id"
        ).fetchall()

    def count(self) -> int:
        return self._one("SELECT COUNT(*) FROM records WHERE owner = ''", ())

    # ---- pins

    def pin(self, name: str, keys: Sequence[bytes]) -> None:
        self._db.executemany("INSERT OR IGNORE INTO pins VALUES (?, ?)", [(name, key) for key in keys])
        self._mark_pinned(keys)

    def unpin(self, name: str) -> bool:
        keys = [k for (k,) in self._db.execute("SELECT key FROM pins WHERE name = ?", (name,))]
        self._db.execute("DELETE FROM pins WHERE name = ?", (name,))
        self._mark_pinned(keys)
        return bool(keys)

    def pins(self) -> dict[str, int]:
        return dict(self._db.execute("SELECT name, COUNT(*) FROM pins GROUP BY name").fetchall())

    def pin_keys(self) -> list[tuple[str, bytes]]:
        return self._db.execute("SELECT name, key FROM pins").fetchall()

    def _mark_pinned(self, keys: Sequence[bytes]) -> None:
        for record in self.records_with(None, keys):
            self._db.execute(
                "UPDATE records SET pinned = EXISTS (SELECT 1 FROM blocks b JOIN pins p ON p.key = b.key "
                "WHERE b.record = ?) WHERE id = ?",
                (record, record),
            )

    def clear(self) -> None:
        """Forget everything."""
        for table in ("blocks", "records", "segments", "pins"):
            self._db.execute(f"DELETE FROM {table}")
        self._db.execute("UPDATE meta SET value = 0 WHERE name='bytes'")

    def shrink(self) -> None:
        """Give back what the file no longer needs."""
        self._db.execute("VACUUM")
        self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def _one(self, query: str, args: Sequence[object]) -> int:
        (found,) = self._db.execute(query, args).fetchone()
        return int(found)


def _parts(keys: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    for i in range(0, len(keys), _PAGE):
        yield keys[i : i + _PAGE]
