"""Tables of rows: JSON Lines, JSON, CSV or Parquet files, folders of these, or data sets on the Hugging Face hub.

Small text files are kept in memory. All others are converted to Arrow files of `datasets`, which the processes of a node share by
memory mapping. Rows of text formats are stored as JSON text, so columns may differ from row to row.
"""

import csv
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, ClassVar

from torchtitan_rl.errors import UserError, expect
from torchtitan_rl.fields.references import caller_folder, from_caller

if TYPE_CHECKING:
    from datasets import Dataset

Row = dict[str, Any]

_CELL_FORMATS = (".csv", ".tsv")
_TEXT_FORMATS = (".jsonl", ".ndjson", ".json", *_CELL_FORMATS)
FORMATS = (*_TEXT_FORMATS, ".parquet")
COMPRESSIONS = (".gz", ".zst", ".bz2", ".lz4")
"""Endings of text files that are read as if they were not compressed."""
SMALL_BYTES = 2**22
"""Text files up to this size in all are kept in memory: reading them takes less time than importing `datasets`."""
BATCH = 1000
"""Number of rows read at once."""
_SPLITS = ("train", "test", "validation", "valid", "val", "dev")
_REMEDY = f"Pass a file ({', '.join(FORMATS)}; texts also with {', '.join(COMPRESSIONS)}), a folder of such files, or the name of a data set on the Hugging Face hub."


class RowError(ValueError):
    """The reason why a row cannot be an example, worded to follow "3 rows"."""


class _Records(list):
    """Records of text files in memory, with the methods of a data set that `Table` calls."""

    features: ClassVar[dict[str, Any]] = {}

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, str]]:
        return [self[index] for index in indices]


@dataclass(frozen=True)
class Table:
    """Rows in the order of their files."""

    name: str
    """Name in messages. Example: "data.jsonl"."""
    _data: "Dataset | _Records"
    is_arrow: bool
    """Whether each column is stored with its type. Otherwise rows are stored as JSON text."""

    def __len__(self) -> int:
        return len(self._data)

    def rows(self, indices: Sequence[int]) -> list[Row]:
        return [self._read(record) for record in self._data.__getitems__(indices)]

    def number(self, index: int) -> str:
        """Returns the row's number in its file, for messages: "3", or "part.jsonl:3" if there are several files."""
        return str(index + 1) if self.is_arrow else self._data[index]["number"]

    def __iter__(self) -> Iterator[Row]:
        for start in range(0, len(self), BATCH):
            yield from self.rows(range(start, min(start + BATCH, len(self))))

    def label(self, column: str, value: Any) -> Any:
        """Returns the value, or the name that the hub shows for it where the column has classes: A for 0. None for no class."""
        names = getattr(self._data.features.get(column), "names", None)
        return value if names is None or value is None else dict(enumerate(names)).get(value)

    def _read(self, record: Row) -> Row:
        if not self.is_arrow:
            return json.loads(record["row"])
        return {column: _without_nulls(value) for column, value in record.items()}


def _without_nulls(value: Any) -> Any:
    """Returns a JSON value without the null entries of its objects, which Arrow adds where other rows have a value."""
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return value


def table_of(name: str, rows: dict[str, Row]) -> Table:
    """Returns rows, by what messages call them in place of a number, as a table."""
    records = [{"number": number, "row": json.dumps(row)} for number, row in rows.items()]
    return Table(name, _Records(records), False)


def _arrow_table(name: str, data: "Dataset") -> Table:
    """Returns a data set as a table, in which images and sounds stay as they are stored: a row with one is left out."""
    import datasets

    for column, feature in data.features.items():
        if isinstance(feature, datasets.Image | datasets.Audio | datasets.Video):
            data = data.cast_column(column, type(feature)(decode=False))
    return Table(name, data, True)


def load_table(path: str, *, subset: str = "", split: str = "train", field: str) -> Table:
    """Returns the rows of a file, of a folder's files for that split, or of a data set on the hub.

    Raises UserError, naming `field` and the remedy, if the path does not exist or has no rows.
    """
    expect(bool(path), field, path, "rows to train on", _REMEDY)
    place = Path(from_caller(path))
    if subset and (place / subset).is_dir():
        place = place / subset
    has_splits = not place.is_file() and not (place / "state.json").is_file()
    expected = (
        "a folder or a data set of the hub, which have splits. One file or saved data set has none"
    )
    remedy = "Leave the split out, or name its file."
    holds = has_splits or split == "train"
    expect(holds, f"the split {split!r} of {field}", path, expected, remedy)
    if (place / "dataset_dict.json").is_file():  # written by DatasetDict.save_to_disk
        saved = sorted(file.parent.name for file in place.glob("*/state.json"))
        there = f"the split {split!r}, but it has {saved}"
        expect(split in saved, field, path, there, "Name one of them.")
        place = place / split
    try:
        if (place / "state.json").is_file():  # written by Dataset.save_to_disk
            import datasets

            table = _arrow_table(place.name, datasets.load_from_disk(str(place)))
        elif place.exists():
            table = _from_files(_files(place, split, field), place.name)
        else:
            table = _from_hub(path, subset, split, field)
    except UserError:
        raise
    except Exception as error:  # many types, for damaged files and caches that cannot be written
        first_line = str(error.__cause__ or error).partition("\n")[0].rstrip(".")
        raise UserError(
            f"{field} = {path!r}: expected rows that can be read, but: {first_line}. {_REMEDY} They are cached in the "
            "folder of HF_HOME, which must be writable."
        ) from error
    expect(len(table) > 0, field, path, "at least one row, but it is empty", _REMEDY)
    return table


def _files(place: Path, split: str, field: str) -> list[Path]:
    """Returns the files with the word `split` in their path below `place`; for "train", all if no path has any split's."""
    if not place.is_dir():
        known = f"one of {', '.join(FORMATS)}"
        expect(_format(place) in FORMATS, field, str(place), known, "Convert it, or rename it.")
        return [place]
    files = [f for f in sorted(place.rglob("*")) if _format(f) in FORMATS and f.is_file()]
    names = [str(file.relative_to(place)) for file in files]
    names = [name for name in names if not re.search(r"(?:^|/)\.", name)]  # no .ipynb_checkpoints
    word = rf"(?<![^\W_]){re.escape(split)}(?:_?\d+)?\b"  # also train_0.jsonl and Train.csv
    of_split = [name for name in names if re.search(word, name, re.IGNORECASE)]
    any_split = rf"(?<![^\W_])(?:{'|'.join(_SPLITS)})(?![^\W\d_])"
    has_splits = any(re.search(any_split, name, re.IGNORECASE) for name in names)
    if split == "train" and not has_splits:
        of_split = of_split or names
    expected = f"files of the split {split!r}, but it has {names}"
    remedy = "Name one of its files." if names else _REMEDY
    expect(bool(of_split), field, str(place), expected, remedy)
    formats = sorted({_format(Path(name)) for name in of_split})
    one = f"files of one format, but it has {formats}"
    expect(len(formats) == 1, field, str(place), one, "Name one file.")
    return [place / name for name in of_split]


def _format(file: Path) -> str:
    """Returns the ending that says how to read the file. Example: ".jsonl" of data.jsonl.gz"""
    inner = Path(file.stem).suffix
    return inner if file.suffix in COMPRESSIONS and inner in _TEXT_FORMATS else file.suffix


def _opened(path: Path) -> BinaryIO:
    import pyarrow

    return io.BufferedReader(pyarrow.input_stream(str(path), compression="detect"))


def is_quick(path: str) -> bool:
    """Whether `load_table` takes less than a second, also to refuse the path."""
    place = Path(from_caller(path))
    if place.is_file():
        return place.stat().st_size <= SMALL_BYTES and place.suffix != ".parquet"
    return not (path and (place.exists() or _is_hub_name(path)))


def _is_hub_name(path: str) -> bool:
    is_name = re.fullmatch(r"[\w.-]+(/[\w.-]+)?", path) is not None
    return is_name and Path(path).suffix not in FORMATS


def _from_files(files: list[Path], name: str) -> Table:
    # Size and modification time are part of the cache key, so an edited file is read again.
    stamped = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    is_text = files[0].suffix != ".parquet"
    if is_text and sum(size for _, size, _ in stamped) <= SMALL_BYTES:
        return Table(name, _Records(_records(stamped)), False)
    import datasets
    from pyarrow.parquet import read_metadata

    datasets.disable_progress_bars()
    if not is_text:
        if not any(read_metadata(file).num_rows for file in files):  # `datasets` fails for these
            return Table(name, _Records(), False)
        return _arrow_table(name, datasets.Dataset.from_parquet([str(file) for file in files]))
    if next(_records(stamped), None) is None:
        return Table(name, _Records(), False)
    features = datasets.Features({key: datasets.Value("large_string") for key in ("number", "row")})
    files_of = {"files": stamped}
    data = datasets.Dataset.from_generator(_records, gen_kwargs=files_of, features=features)
    return Table(name, data, False)


def _from_hub(path: str, subset: str, split: str, field: str) -> Table:
    where = "" if Path(path).is_absolute() else f" in {caller_folder()}"
    remedy = f"There is none{where}. {_REMEDY}"
    expect(_is_hub_name(path), field, path, "a file or folder that exists", remedy)
    try:
        return _arrow_table(path, _load_from_hub(path, subset, split))
    except Exception:
        download(path, subset, split, field)
    return _arrow_table(path, _load_from_hub(path, subset, split))


def _load_from_hub(path: str, subset: str, split: str) -> "Dataset":
    import datasets

    return datasets.load_dataset(path, subset or None, split=split)


def download(path: str, subset: str, split: str, field: str) -> None:
    """Downloads a data set in a separate process, because this one runs its libraries offline. Progress is on stderr."""
    from torchtitan_rl import HUB_OFFLINE

    command = [sys.executable, "-c", f"from {__name__} import _main; _main()", path, subset, split]
    environment = {**os.environ, "HF_HUB_OFFLINE": HUB_OFFLINE}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
    expect(
        done.returncode == 0, field, path,
        f"a file or folder that exists in {caller_folder()}, or a data set of the Hugging Face hub with the configuration "
        f"{subset!r} (task.subset) and the split {split!r}, but: {done.stdout.strip().rstrip('.')}", _REMEDY,
    )  # fmt: skip


def _records(files: list[tuple[str, int, int]]) -> Iterator[dict[str, str]]:
    """Yields every row of text files as its number and its JSON text. Raises ValueError with the number of a row that is none."""
    for path, _, _ in files:
        place = Path(path)
        read = _csv_rows if _format(place) in _CELL_FORMATS else _json_rows
        for number, row in read(place):
            where = f"{place.name}:{number}" if len(files) > 1 else str(number)
            if not isinstance(row, dict):
                raise ValueError(f"row {where}: not a JSON object")
            yield {"number": where, "row": json.dumps(row)}


def _json_rows(path: Path) -> Iterator[tuple[int, Any]]:
    """Yields a .json file's list item by item. JSON Lines, also in a .json file, are read line by line."""
    with _opened(path) as file:
        begin = file.peek(64).lstrip(b"\xef\xbb\xbf \t\r\n")  # after a byte order mark
        if _format(path) == ".json" and begin.startswith(b"["):
            yield from enumerate(json.load(file), start=1)
            return
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                yield number, json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"row {number}: {error}") from None


def _csv_rows(path: Path) -> Iterator[tuple[int, Row]]:
    """Yields a CSV file's records as texts by column. An empty cell is None."""
    csv.field_size_limit(2**31 - 1)
    delimiter = "\t" if _format(path) == ".tsv" else ","
    with _opened(path) as file:
        text = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
        rows = csv.DictReader(text, delimiter=delimiter, strict=True, skipinitialspace=True)
        rows.fieldnames = [name.strip() for name in rows.fieldnames or ()]
        if twice := {name for name in rows.fieldnames if rows.fieldnames.count(name) > 1}:
            raise ValueError(f"the header has several columns {sorted(twice)}")
        for number, row in enumerate(rows, start=1):
            if row.pop(None, None):
                raise ValueError(f"row {number}: more fields than the header")
            yield number, {column: cell or None for column, cell in row.items()}


def _main() -> None:
    """Downloads the data set named on the command line into the cache; on failure prints the error and exits with 2."""
    from huggingface_hub import HfApi, constants

    try:
        # `datasets` asks for almost a minute.
        HfApi().dataset_info(sys.argv[1], timeout=constants.HF_HUB_ETAG_TIMEOUT)
        _load_from_hub(*sys.argv[1:])
    except Exception as error:
        print(str(error).partition("\n")[0])
        sys.exit(2)
