"""Tables from files: CSV, also compressed, and Parquet. What is wrong with a file is said in one line, with where."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import lzma
import zlib
from collections import Counter
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import IO, Any

from coterie.storage.archives import Bounded
from coterie.tables.column_sums import Frame

_OPENERS: dict[str, Callable[..., IO[Any]]] = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}
_PARQUET = (".parquet", ".pq")
_SEPARATORS = ",;\t|"
_LONGEST = 2**20  # characters of a field: a quote that is never closed would take the rest of the file


def read_table(path: str | Path) -> Frame:
    """Read a table: `.csv`, `.tsv` or `.txt`, also with `.gz`, `.xz` or `.bz2` behind it, or `.parquet`.

    Args:
        path: The file. A CSV file has a header; its separator (comma, semicolon, tab or bar) is found out.

    Raises:
        ValueError: The file is not there, damaged, not UTF-8 or not a table; says where.
    """
    file = Path(path)
    if file.is_dir():
        raise ValueError(f"{file} is a folder, not a table")
    if not file.is_file():
        raise ValueError(f"{file}: there is no such file")
    suffix = file.with_suffix("").suffix if file.suffix in _OPENERS else file.suffix
    if suffix.lower() in _PARQUET:
        return _read_parquet(file)
    if suffix.lower() not in (".csv", ".tsv", ".txt"):
        raise ValueError(f"{file}: a table must be .csv (also .csv.gz, .csv.xz) or .parquet, got '{file.suffix}'")
    return _read_csv(file)


def _read_parquet(path: Path) -> Frame:
    import pandas as pd

    try:
        frame = pd.read_parquet(path)
    except ImportError:
        raise ValueError(f"{path}: Parquet needs the package pyarrow: pip install 'coterie[parquet]'") from None
    except (ValueError, OSError) as error:
        raise ValueError(f"{path} cannot be read as Parquet ({_first_line(error)})") from None
    _check_names(path, [str(name) for name in frame.columns])
    return frame


def _read_csv(path: Path) -> Frame:
    import pandas as pd

    try:
        return pd.read_csv(path, sep=_separator(path), encoding="utf-8-sig", low_memory=False)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 ({error.reason} at byte {error.start}): save it as UTF-8") from None
    except (EOFError, lzma.LZMAError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{path} cannot be unpacked: it is damaged or cut off ({_first_line(error)})") from None
    except pd.errors.ParserError as error:
        raise ValueError(f"{path} is no table of comma-separated values ({_first_line(error)})") from None


def _separator(path: Path) -> str:
    """What is between fields, once every line has as many as the header: pandas fills short ones without a word."""
    with open_text(path) as file:
        first = file.readline()
        if not first.strip():
            raise ValueError(f"{path} has no header: its first line is empty")
        csv.field_size_limit(_LONGEST)
        separator = max(_SEPARATORS, key=lambda by: len(next(csv.reader([first], delimiter=by))))
        reader, rows = csv.reader(chain([first], file), delimiter=separator), 0
        names = next(reader)
        _check_names(path, names)
        if len(names) == 1:
            hint = "columns must be separated by commas, semicolons, tabs or bars"
            raise ValueError(f"{path} has one column only, '{names[0]}': {hint}")
        try:
            for line in reader:
                if line and len(line) != len(names):
                    what = f"{len(line):,} value{'s' * (len(line) != 1)}, the header {len(names):,}"
                    raise ValueError(f"{path}: line {reader.line_num} has {what}")
                rows += bool(line)
        except csv.Error as error:
            raise ValueError(f"{path}: line {reader.line_num}: {error}; is a quote never closed?") from None
    if not rows:
        raise ValueError(f"{path} has a header and no rows")
    return separator


def open_text(path: Path) -> IO[str]:
    """Open a file of text, which is unpacked on the way where it is compressed, as far as `archives.bound` allows.

    Args:
        path: The file.
    """
    opener = _OPENERS.get(path.suffix)
    if opener is not None:
        return io.TextIOWrapper(Bounded(opener(path, "rb"), path), encoding="utf-8-sig", newline="")
    return path.open(encoding="utf-8-sig", newline="")


def _check_names(path: Path, names: list[str]) -> None:
    if repeated := [name for name, times in Counter(names).items() if times > 1]:
        raise ValueError(f"{path}: two columns are called '{repeated[0]}'")


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
