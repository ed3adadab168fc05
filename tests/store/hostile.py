"""Run directories that were damaged or made to harm, each derived from a real run by one small change."""

from __future__ import annotations

import json
import os
import socket
import sqlite3
import struct
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

Change = Callable[[Path], None]

ESCAPES = "[red]x[/red]\x1b]0;y\x07\x9b31m\u202e\n"
"""What must not reach a terminal as it is."""
ENDLESS = "WITH RECURSIVE rows(n) AS (SELECT 0 UNION ALL SELECT n + 1 FROM rows) SELECT"
FILES = ("run.json", "summary.json", "run.db", "run.db-wal", "run.db-shm", "run.db-journal")


@dataclass(frozen=True)
class Variant:
    name: str
    change: Change


def fixed_variants(run: Path) -> Iterator[Variant]:
    """Changes that have a reason of their own."""
    yield from _texts()
    yield from _kinds_of_files()
    yield from _schemas(run)
    yield from _pages()
    yield from _bombs()


def random_variants(run: Path, random: Random, num_each: int) -> Iterator[Variant]:
    """So many of each kind of which there are thousands."""
    for many in (_wrong_values(run), _wrong_cells(run), _wrong_records(run), _cuts(run), _flips(run, random)):
        members = list(many)
        yield from random.sample(members, min(num_each, len(members)))


# run.json


def _texts() -> Iterator[Variant]:
    """Whole contents of run.json."""
    contents: dict[str, bytes] = {
        "empty": b"",
        "null": b"null",
        "a list": b"[]",
        "a number": b"7",
        "an object": b"{}",
        "a word": b'"run"',
        "NUL bytes": bytes(1000),
        "invalid UTF-8": b'{"format": 2, "facts": {"model": "\xff\xfe"}}',
        "UTF-16": '{"format": 2}'.encode("utf-16"),
        "a byte order mark": b'\xef\xbb\xbf{"format": 2}',
        "deep lists": b"[" * 100_000,
        "deep objects": b'{"a":' * 100_000,
        "closed deep lists": b"[" * 900 + b"]" * 900,
        "format as a long number": b'{"format": ' + b"9" * 4000 + b"}",
        "format as a longer number": b'{"format": ' + b"9" * 5000 + b"}",
        "format NaN": b'{"format": NaN}',
        "format Infinity": b'{"format": -Infinity}',
        "format true": b'{"format": true}',
        "format of tomorrow": b'{"format": 99}',
        "a float of nothing": b'{"format": {"__float__": [1]}}',
        "a float of a word": b'{"format": {"__float__": "\\u001b[31m"}}',
        "20 MB of blanks": b" " * (20 << 20),
        "many small objects": b"[" + b"{}," * 5_000_000 + b"{}]",
        "a long word": b'"' + b"x" * (15 << 20) + b'\xf0\x9f\x98\x80"',
    }
    for name, content in contents.items():
        yield Variant(f"run.json: {name}", lambda path, content=content: _put(path / "run.json", content))
    yield Variant("run.json: 10 GB of nothing", lambda path: os.truncate(path / "run.json", 10 << 30))


WRONG: dict[str, Any] = {
    "null": None,
    "true": True,
    "minus 1": -1,
    "0": 0,
    "10 million": 10**7,
    "a billion": 10**9,
    "a float": 0.5,
    "a huge float": 1e308,
    "NaN": float("nan"),
    "minus infinity": float("-inf"),
    "a number of 299 digits": 10**298,
    "a number of 4000 digits": 10**3999,
    "an empty word": "",
    "a hostile word": ESCAPES,
    "a surrogate": "\ud800",
    "a NUL": "a\0b",
    "a list": [],
    "a list of lists": [[], [None]],
    "an object": {},
    "an object of objects": {"a": {"b": {}}, ESCAPES: 1},
    "deep": json.loads("[" * 90 + "]" * 90),
    "deeper": json.loads("[" * 800 + "]" * 800),
}


def _wrong_values(run: Path) -> Iterator[Variant]:
    """A wrong value at every key of run.json, and every key missing."""
    plain = json.loads((run / "run.json").read_text())
    for keys in _places(plain):
        where = ".".join(map(str, keys))
        yield Variant(f"run.json: {where} is missing", lambda path, keys=keys: _edit(path, keys))
        for name, value in WRONG.items():
            yield Variant(f"run.json: {where} is {name}", lambda path, keys=keys, value=value: _edit(path, keys, value))


def _places(plain: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = plain.items() if isinstance(plain, dict) else enumerate(plain) if isinstance(plain, list) else ()
    for key, value in items:
        yield (*above, key)
        yield from _places(value, (*above, key))


def _edit(path: Path, keys: tuple[Any, ...], *value: Any) -> None:
    plain = json.loads((path / "run.json").read_text())
    _put(path / "run.json", json.dumps(_edited(plain, keys, *value)).encode())


def _edited(plain: Any, keys: tuple[Any, ...], *value: Any) -> Any:
    """With the value at these keys, or without them."""
    holder = plain
    for key in keys[:-1]:
        holder = holder[key]
    if value:
        holder[keys[-1]] = value[0]
    else:
        del holder[keys[-1]]
    return plain


# run.db


def _schemas(run: Path) -> Iterator[Variant]:
    """Databases with something in them that is not ours."""
    with _database(run) as connection:
        tables = {
            name: [column[1] for column in connection.execute(f"PRAGMA table_info({name})")]
            for name in _tables(connection)
        }
    for table, columns in tables.items():
        endless = ", ".join(f"n AS {column}" for column in columns)
        large = ", ".join(f"{column} AS (hex(zeroblob(1000000)))" for column in columns if column != "id")
        yield _sql(f"no table {table}", f"DROP TABLE {table}")
        yield _sql(
            f"an endless view as {table}", f"DROP TABLE {table}",
            f"CREATE VIEW {table} AS {ENDLESS} {endless} FROM rows",
        )  # fmt: skip
        yield _sql(
            f"generated columns in {table}", f"DROP TABLE {table}",
            f"CREATE TABLE {table} (id INTEGER PRIMARY KEY, {large})", f"INSERT INTO {table} DEFAULT VALUES",
        )  # fmt: skip
    yield _sql("a view", f"CREATE VIEW more AS {ENDLESS} n FROM rows")
    yield _sql("a trigger", "CREATE TRIGGER more AFTER INSERT ON tail BEGIN DELETE FROM tail; END")
    yield _sql("a virtual table", "CREATE VIRTUAL TABLE more USING fts5(x)")
    yield _sql("a table more", "CREATE TABLE more (x)")
    yield _sql("an index on an expression", "CREATE INDEX more ON records (hex(body))")
    yield _sql("statistics", "ANALYZE")
    yield _sql("a foreign application", "PRAGMA application_id = 7")
    yield _sql("a newer format", "PRAGMA user_version = 99")
    yield _sql("a negative format", "PRAGMA user_version = -99")
    yield _sql("a hostile name", f'CREATE TABLE "{ESCAPES}" (x)')
    yield Variant("run.db: a schema that is no SQL", lambda path: _rewrite_schema(path, "nonsense \x1b[31m"))
    yield Variant("run.db: a long schema", lambda path: _rewrite_schema(path, f"CREATE TABLE tail ({'x' * 1_000_000})"))
    yield Variant("run.db: a foreign database", lambda path: _foreign(path, "UTF-8"))
    yield Variant("run.db: a foreign database in UTF-16", lambda path: _foreign(path, "UTF-16"))


def _wrong_cells(run: Path) -> Iterator[Variant]:
    """A wrong value in every column of every table."""
    values = {
        "a word": "'x'",
        "no bytes": "x''",
        "few bytes": "x'0102030405'",
        "many bytes": "zeroblob(300000)",
        "bytes of ff": "x'" + "ff" * 64 + "'",
        "minus 1": "-1",
        "0": "0",
        "the largest number": "9223372036854775807",
        "the smallest number": "-9223372036854775808",
        "infinity": "9e999",
        "a fraction": "0.5",
        "no UTF-8": "CAST(x'ff1b5d' AS TEXT)",
        "a hostile word": f"CAST(x'{ESCAPES.encode().hex()}' AS TEXT)",
        "a JSON object": "'{}'",
        "a JSON list": "'[]'",
        "a JSON list of a hostile word": f"'{json.dumps([ESCAPES])}'",
        "JSON with a long number": f"'[{'9' * 4000}]'",
        "deep JSON": f"'{'[' * 5000}'",
        "closed deep JSON": f"'{'[' * 200 + ']' * 200}'",
    }
    with _database(run) as connection:
        for table in _tables(connection):
            for column in [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]:
                for name, value in values.items():
                    first = f"WHERE rowid = (SELECT min(rowid) FROM {table})"
                    yield _sql(f"{table}.{column} is {name}", f"UPDATE OR IGNORE {table} SET {column} = {value}")
                    yield _sql(
                        f"the first {table}.{column} is {name}",
                        f"UPDATE OR IGNORE {table} SET {column} = {value} {first}",
                    )
            yield _sql(f"{table} is empty", f"DELETE FROM {table}")
            yield _sql(f"{table} is half empty", f"DELETE FROM {table} WHERE rowid % 2")
            yield _sql(f"{table} is turned round", f"UPDATE OR REPLACE {table} SET rowid = -rowid")


def _wrong_records(run: Path) -> Iterator[Variant]:
    """A wrong value at every key of an alert, a finding and an event."""
    with _database(run) as connection:
        for table, column in (("records", "body"), ("events", "data")):
            for number, text in connection.execute(f"SELECT max(id), {column} FROM {table} GROUP BY kind").fetchall():
                plain = json.loads(text)
                for keys in _places(plain):
                    for name, value in WRONG.items():
                        body = json.dumps(_edited(json.loads(text), keys, value))
                        change = _sql(
                            f"{table} {number} has {name} at {'.'.join(map(str, keys))}",
                            (f"UPDATE {table} SET {column} = ? WHERE id = ?", (body, number)),
                        )
                        yield change


def _cuts(run: Path) -> Iterator[Variant]:
    """Both files cut off."""
    for name in ("run.json", "run.db"):
        size = (run / name).stat().st_size
        for length in sorted(
            {0, 1, 15, 16, 99, 100, 511, 512, 4095, 4096, 4097, size // 3, size // 2, size - 4096, size - 1}
        ):
            if 0 <= length < size:
                yield Variant(
                    f"{name}: cut to {length} bytes",
                    lambda path, name=name, length=length: os.truncate(path / name, length),
                )


def _flips(run: Path, random: Random) -> Iterator[Variant]:
    """One or a few bytes changed anywhere, most often where they matter most."""
    pages = (run / "run.db").stat().st_size // 4096
    for number in range(400):
        name = "run.json" if number % 4 == 0 else "run.db"
        size = (run / name).stat().st_size
        places = [random.randrange(size) for _ in range(random.choice((1, 1, 8, 40)))]
        if number % 4 == 1:  # the header of a page
            places = [4096 * random.randrange(pages) + random.randrange(24)]
        if number % 4 == 2:  # the header of the file
            places = [random.randrange(100)]
        new = {place: random.choice((0, 0x7F, 0x80, 0xFF, random.randrange(256))) for place in places}
        yield Variant(f"{name}: new bytes {new}", lambda path, name=name, new=new: _poke(path / name, new))


def _pages() -> Iterator[Variant]:
    """Databases whose pages are in order one by one and make no sense together."""
    yield Variant("run.db: pages of records that lead in circles", lambda path: _never_ending(path, "records"))
    yield Variant("run.db: pages of events that lead in circles", lambda path: _never_ending(path, "events"))
    yield Variant("run.db: pages of layouts that lead in circles", lambda path: _never_ending(path, "layouts"))
    yield Variant("run.db: pages of the schema that lead in circles", lambda path: _never_ending(path, "sqlite_master"))
    yield Variant("run.db: a table that is another", lambda path: _swap_roots(path, "tail", "events"))
    yield Variant("run.db: spans that are bands", lambda path: _swap_roots(path, "spans", "bands"))
    yield Variant("run.db: a table that is an index", lambda path: _swap_roots(path, "records", "chunks_in_order"))
    yield Variant("run.db: rows without end in a few bytes", _rows_out_of_nothing)
    yield Variant("run.db: a row of 900 MB in a sparse file", _long_row)
    yield _sql("one page size after another", "PRAGMA journal_mode = DELETE", "PRAGMA page_size = 512", "VACUUM")
    yield _sql("vacuum on its own", "PRAGMA auto_vacuum = FULL", "VACUUM")
    numbers = "WITH RECURSIVE n(x) AS (SELECT 1000 UNION ALL SELECT x + 1 FROM n WHERE x < 300000)"
    yield _sql("very many layouts", f"{numbers} INSERT INTO layouts SELECT x, 'a/b', 0, 1 FROM n")
    yield _sql("layouts of many scopes", "UPDATE layouts SET num_scopes = 1 << 40")
    yield _sql("a chunk of many rows", "UPDATE chunks SET count = 1 << 40, last = 1 << 41")


def _bombs() -> Iterator[Variant]:
    """Histograms that ask for more memory than they take."""
    yield Variant("run.db: histograms in zlib streams cut off", lambda path: _set_histograms(path, 1 << 20, 1000))
    yield _sql("histograms of another kind", "UPDATE distributions SET body = x'07070707070707070707'")
    yield _sql("histograms of many scopes", "UPDATE distributions SET count = 1 << 40")
    yield _sql("histograms of no scopes", "UPDATE distributions SET count = 0, first = -5")
    yield _sql("histograms of scopes that are missing", "UPDATE distributions SET scopes = 1 << 50")


ZLIB_BOMB = Variant("run.db: histograms of 400 MB in a zlib stream", lambda path: _set_histograms(path, 400 << 20))


def _set_histograms(path: Path, num_bytes: int, cut: int | None = None) -> None:
    with _database(path) as connection:
        connection.execute("UPDATE distributions SET body = ?", [zlib.compress(bytes(num_bytes))[:cut]])


# The files


def _kinds_of_files() -> Iterator[Variant]:
    """Everything that can have the name of a file of ours."""
    targets = {
        "nowhere": "/nowhere/at/all",
        "a directory": "/",
        "zeros": "/dev/zero",
        "random bytes": "/dev/urandom",
        "null": "/dev/null",
    }
    for name in FILES:
        yield Variant(f"{name} is a FIFO", lambda path, name=name: os.mkfifo(_gone(path / name)))
        yield Variant(f"{name} is a socket", lambda path, name=name: _socket(_gone(path / name)))
        yield Variant(f"{name} is a directory", lambda path, name=name: _gone(path / name).mkdir())
        yield Variant(f"{name} is a link to itself", lambda path, name=name: _gone(path / name).symlink_to(name))
        for word, target in targets.items():
            yield Variant(
                f"{name} is a link to {word}",
                lambda path, name=name, target=target: _gone(path / name).symlink_to(target),
            )
        yield Variant(f"{name} is a link to a FIFO", lambda path, name=name: _link_to_fifo(path / name))
        yield Variant(f"{name} is missing", lambda path, name=name: _gone(path / name) and None)
        yield Variant(f"{name} is empty", lambda path, name=name: _put(path / name, b""))
        yield Variant(f"{name} is noise", lambda path, name=name: _put(path / name, Random(0).randbytes(9999)))
        yield Variant(
            f"{name} may not be read", lambda path, name=name: (path / name).touch() or (path / name).chmod(0)
        )
        yield Variant(
            f"{name} is 1 TB of nothing",
            lambda path, name=name: (path / name).touch() or os.truncate(path / name, 1 << 40),
        )
    yield Variant("a journal of a killed writer", lambda path: old_journal(path, b""))
    yield Variant("the directory links to itself a hundred times", _links_to_itself)


def _gone(path: Path) -> Path:
    path.unlink(missing_ok=True)
    return path


def _put(path: Path, content: bytes) -> None:
    path.write_bytes(content)


def _poke(path: Path, new: dict[int, int]) -> None:
    content = bytearray(path.read_bytes())
    for place, value in new.items():
        content[place] = value
    path.write_bytes(content)


def _socket(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # the path of a socket must be short
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path.name)
    finally:
        os.chdir(here)


def _link_to_fifo(path: Path) -> None:
    os.mkfifo(path.with_name("fifo"))
    _gone(path).symlink_to("fifo")


def _links_to_itself(path: Path) -> None:
    for name in FILES:
        _gone(path / name)
    for number in range(100):
        (path / f"loop{number}").symlink_to(".")


def old_journal(path: Path, names: bytes) -> None:
    """A journal that waits to be rolled back: the header, one page, and at the end the name of a further journal."""
    database = (path / "run.db").read_bytes()
    magic = bytes.fromhex("d9d505f920a163d7")
    header = magic + struct.pack(">IIIII", 1, 0, len(database) // 4096, 512, 4096)
    page = struct.pack(">I", 1) + database[:4096]
    checksum = sum(database[4096 - 200 * place] for place in range(1, 21) if 4096 - 200 * place > 0)
    record = struct.pack(">I", 0) + names + struct.pack(">II", len(names), sum(names)) + magic if names else b""
    journal = path / "run.db-journal"
    journal.write_bytes(header.ljust(512, b"\0") + page + struct.pack(">I", checksum) + record)
    os.utime(journal, (0, 0))


# SQLite


def _database(path: Path) -> closing[sqlite3.Connection]:
    return closing(sqlite3.connect(path / "run.db", isolation_level=None))


def _tables(connection: sqlite3.Connection) -> list[str]:
    return [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]


def _sql(name: str, *statements: str | tuple[str, tuple[Any, ...]]) -> Variant:
    def change(path: Path) -> None:
        with _database(path) as connection:
            for statement in statements:
                with suppress(sqlite3.IntegrityError):  # a key of a table is a number, whatever is wanted
                    connection.execute(*([statement] if isinstance(statement, str) else statement))

    return Variant(f"run.db: {name}", change)


def _rewrite_schema(path: Path, statement: str) -> None:
    with _database(path) as connection:
        connection.execute("PRAGMA writable_schema = ON")
        connection.execute("UPDATE sqlite_master SET sql = ? WHERE name = 'tail'", [statement])


def _foreign(path: Path, encoding: str) -> None:
    _gone(path / "run.db")
    with _database(path) as connection:
        connection.execute(f"PRAGMA encoding = '{encoding}'")
        connection.execute("CREATE TABLE mine (x)")
        connection.execute("PRAGMA application_id = 0x3477726e")


def _root(connection: sqlite3.Connection, name: str) -> int:
    if name == "sqlite_master":
        return 1
    return int(connection.execute("SELECT rootpage FROM sqlite_master WHERE name = ?", [name]).fetchone()[0])


def _swap_roots(path: Path, first: str, second: str) -> None:
    with _database(path) as connection:
        pages = {first: _root(connection, second), second: _root(connection, first)}
        connection.execute("PRAGMA writable_schema = ON")
        for name, page in pages.items():
            connection.execute("UPDATE sqlite_master SET rootpage = ? WHERE name = ?", [page, name])


def _never_ending(path: Path, table: str) -> None:
    """The pages of a table made so that each leads to the next four hundred times, ten levels deep."""
    with _database(path) as connection:
        root = _root(connection, table)
        (page_bytes,) = connection.execute("PRAGMA page_size").fetchone()
    content = bytearray((path / "run.db").read_bytes())
    last = len(content) // page_bytes
    copy = content[(root - 1) * page_bytes : root * page_bytes]
    if root == 1:
        copy = copy[100:].ljust(page_bytes, b"\0")  # cells of this leaf point past its end: it need not be sound
    chain = list(range(last + 1, last + 10))
    content += copy + bytes(page_bytes * 9)
    leaf = last + 1
    for page, child in zip((*chain[1:], root), (leaf, *chain[1:]), strict=True):
        begin = 100 if page == 1 else 0
        cells = 400
        start = page_bytes - 5 * cells
        header = struct.pack(">BHHHBI", 5, 0, cells, start, 0, child)
        pointers = b"".join(struct.pack(">H", start + 5 * number) for number in range(cells))
        body = (struct.pack(">I", child) + b"\x01") * cells
        whole = bytearray(content[(page - 1) * page_bytes : page * page_bytes])
        whole[begin : begin + 12 + 2 * cells] = header + pointers
        whole[start:] = body
        content[(page - 1) * page_bytes : page * page_bytes] = whole
    content[28:32] = struct.pack(">I", len(content) // page_bytes)
    (path / "run.db").write_bytes(content)


def _rows_out_of_nothing(path: Path) -> None:
    """Spans of 262,144 rows each that have no blocks, so no times: a few bytes for every million rows."""
    with _database(path) as connection:
        for table in ("tail", "spans", "chunks", "patterns"):
            connection.execute(f"DELETE FROM {table}")
        connection.execute("INSERT INTO patterns VALUES (0, 1, x'')")
        rows = 1 << 18
        connection.execute("BEGIN")
        connection.executemany(
            "INSERT INTO spans VALUES (?, ?, 0, ?, x'00000000', x'')",
            [(n * rows, (n + 1) * rows - 1, struct.pack("<qq", n * rows, 1)) for n in range(2000)],
        )
        connection.execute("COMMIT")


def _long_row(path: Path) -> None:
    """An event that says that it has 130 MB, in a file that is long enough for it and holds almost nothing."""
    size, claimed = 3_000_000, 130_000_000
    with _database(path) as connection:
        connection.execute("INSERT INTO events VALUES (NULL, 1.5, 'end', zeroblob(?))", [size])
    content = (path / "run.db").read_bytes()
    for before, after in ((size + 19, claimed + 19), (2 * size + 12, 2 * claimed + 12)):  # of the row, of the cell
        assert content.count(_varint(before)) == 1
        content = content.replace(_varint(before), _varint(after))
    content = content[:28] + struct.pack(">I", (10 << 30) // 4096) + content[32:]
    _put(path / "run.db", content)
    os.truncate(path / "run.db", 10 << 30)


def _varint(number: int) -> bytes:
    """As SQLite writes numbers of four times seven bits."""
    return bytes([0x80 | number >> shift & 0x7F for shift in (21, 14, 7)] + [number & 0x7F])
