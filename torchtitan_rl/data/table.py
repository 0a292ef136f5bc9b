"""Tables of rows: JSON Lines, JSON, CSV or Parquet files, folders of these, or data sets on the Hugging Face hub.

All are converted to Arrow files of `datasets`, which the processes of a node share by memory mapping. Rows of text
formats are stored as text, so columns may differ from row to row, and an unreadable row is reported by its number.
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
from typing import TYPE_CHECKING, Any, BinaryIO

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
NESTED = "nested too deeply"
_NO_UTF8 = "not UTF-8; save the file as UTF-8, or unpack it if it is compressed"
BATCH = 1000
"""Number of rows read at once."""
_SPLITS = ("train", "test", "validation", "valid", "val", "dev")
_REMEDY = f"Pass a file ({', '.join(FORMATS)}; texts also with {', '.join(COMPRESSIONS)}), a folder of such files, or the name of a data set on the Hugging Face hub."


class RowError(ValueError):
    """The reason why a row is invalid, worded to follow "rows 3, 7: "."""


@dataclass(frozen=True)
class Table:
    """Rows in the order of their files."""

    name: str
    """Name in messages. Example: "data.jsonl"."""
    _data: "Dataset"
    _as_text: bool
    has_text_cells: bool = False
    """Whether each cell is a text, as in CSV files."""

    @property
    def is_arrow(self) -> bool:
        """Whether objects have a null for every field that an object of another row has."""
        return not self._as_text

    def __len__(self) -> int:
        return len(self._data)

    def rows(self, indices: Sequence[int]) -> list[Row]:
        """Returns the rows at `indices`. Raises RowError if one cannot be read."""
        return [self._read(record) for record in self._data.__getitems__(indices)]

    def number(self, index: int) -> str:
        """Returns the row's number in its file, for messages: "3", or "part.jsonl:3" if there are several files."""
        return self._data[index]["number"] if self._as_text else str(index + 1)

    def numbered_rows(self) -> Iterator[tuple[str, Row | RowError]]:
        """Yields the number of every row together with the row, or with the error if it cannot be read."""
        for start in range(0, len(self), BATCH):
            batch = range(start, min(start + BATCH, len(self)))
            for index, record in zip(batch, self._data.__getitems__(batch), strict=True):
                try:
                    yield record["number"] if self._as_text else str(index + 1), self._read(record)
                except RowError as error:
                    yield record["number"], error

    def label(self, column: str, value: Any) -> Any:
        """Returns the value, or the name that the hub shows for it where the column has classes: A for 0. None for no class."""
        names = getattr(self._data.features.get(column), "names", None)
        return value if names is None or value is None else dict(enumerate(names)).get(value)

    def _read(self, record: Row) -> Row:
        if not self._as_text:
            return record
        if record["fault"]:
            raise RowError(record["fault"])
        try:
            row = json.loads(record["row"])
        except json.JSONDecodeError as error:
            raise RowError("not valid JSON; expected one object on each line") from error
        except ValueError as error:  # an integer of more than 4,300 digits
            raise RowError(str(error).partition(";")[0]) from error
        except RecursionError as error:
            raise RowError(NESTED) from error
        if isinstance(row, list):
            raise RowError(
                "not a JSON object; rows are objects (a conversation's: messages, answer), and a file with one list of "
                "them is named .json"
            )
        if not isinstance(row, dict):
            raise RowError("not a JSON object")
        return row


def load_table(
    path: str, *, subset: str = "", split: str = "train", field: str = "task.path"
) -> Table:
    """Returns the rows of a file, of a folder's files for that split, or of a data set on the hub.

    Raises:
        UserError: naming `field` and the remedy, if the path does not exist or has no rows.
    """
    expect(bool(path), field, path, "rows to train on", _REMEDY)
    place = Path(from_caller(str(Path(path).expanduser())))
    if subset and (place / subset).is_dir():
        place = place / subset
    has_splits = not place.is_file() and not (place / "state.json").is_file()
    expect(
        has_splits or split == "train", f"the split {split!r} of {field}", path,
        "a folder or a data set of the hub, which have splits. One file or saved data set has none",
        "Leave the split out, or name its file.",
    )  # fmt: skip
    if (place / "dataset_dict.json").is_file():  # written by DatasetDict.save_to_disk
        saved = sorted(file.parent.name for file in place.glob("*/state.json"))
        there = f"the split {split!r}, but it has {saved}"
        expect(split in saved, field, path, there, "Name one of them.")
        place = place / split
    try:
        if (place / "state.json").is_file():  # written by Dataset.save_to_disk
            import datasets

            table = Table(place.name, datasets.load_from_disk(str(place)), False)
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
    files = [file for file in sorted(place.rglob("*")) if _format(file) in FORMATS]
    names = [str(file.relative_to(place)) for file in files]
    names = [name for name in names if not re.search(r"(?:^|/)\.", name)]  # no .ipynb_checkpoints
    of_split = [name for name in names if re.search(rf"(?<![^\W_]){re.escape(split)}\b", name)]
    any_split = rf"(?<![^\W_])(?:{'|'.join(_SPLITS)})(?![^\W\d_])"
    if split == "train" and not any(re.search(any_split, name) for name in names):
        of_split = of_split or names
    expect(
        bool(of_split), field, str(place), f"files of the split {split!r}, but it has {names}",
        "Name one of its files." if names else _REMEDY,
    )  # fmt: skip
    formats = sorted({_format(Path(name)) for name in of_split})
    one = f"files of one format, but it has {formats}"
    expect(len(formats) == 1, field, str(place), one, "Name one file.")
    return [place / name for name in of_split]


def _format(file: Path) -> str:
    """Returns the ending that says how to read the file. Example: ".jsonl" of data.jsonl.gz"""
    inner = Path(file.stem).suffix
    return inner if file.suffix in COMPRESSIONS and inner in _TEXT_FORMATS else file.suffix


def _opened(path: Path) -> BinaryIO:
    """Opens a file, which may be compressed."""
    import pyarrow

    return io.BufferedReader(pyarrow.input_stream(str(path), compression="detect"))


def _from_files(files: list[Path], name: str) -> Table:
    import datasets
    from pyarrow.parquet import read_metadata

    datasets.disable_progress_bars()
    if files[0].suffix == ".parquet":
        if not any(read_metadata(file).num_rows for file in files):  # `datasets` fails for these
            return Table(name, datasets.Dataset.from_dict({"row": []}), True)
        return Table(name, datasets.Dataset.from_parquet([str(file) for file in files]), False)
    # Size and modification time are part of the cache key, so an edited file is read again.
    stamped = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    features = datasets.Features(
        {key: datasets.Value("large_string") for key in ("number", "row", "fault")}
    )
    if next(_records(stamped), None) is None:
        return Table(name, datasets.Dataset.from_dict({"row": []}), True)
    data = datasets.Dataset.from_generator(
        _records, gen_kwargs={"files": stamped}, features=features
    )
    return Table(name, data, True, has_text_cells=_format(files[0]) in _CELL_FORMATS)


def _from_hub(path: str, subset: str, split: str, field: str) -> Table:
    is_name = re.fullmatch(r"[\w.-]+(/[\w.-]+)?", path) and Path(path).suffix not in FORMATS
    where = "" if Path(path).is_absolute() else f" in {caller_folder()}"
    remedy = f"There is none{where}. {_REMEDY}"
    expect(bool(is_name), field, path, "a file or folder that exists", remedy)
    try:
        return Table(path, _load_from_hub(path, subset, split), False)
    except Exception:
        download(path, subset, split, field)
    return Table(path, _load_from_hub(path, subset, split), False)


def _load_from_hub(path: str, subset: str, split: str) -> "Dataset":
    import datasets

    return datasets.load_dataset(path, subset or None, split=split)


def download(path: str, subset: str, split: str, field: str) -> None:
    """Downloads a data set in a separate process, because this one runs its libraries offline.

    Progress is on stderr.
    """
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
    """Yields every row of text files as its number, its JSON text, and the reason why it is invalid, or ""."""
    for path, _, _ in files:
        place = Path(path)
        read = _csv_records if _format(place) in _CELL_FORMATS else _json_records
        for number, row, fault in read(place):
            where = f"{place.name}:{number}" if len(files) > 1 else str(number)
            yield {"number": where, "row": row, "fault": fault}


def _json_records(path: Path) -> Iterator[tuple[int, str, str]]:
    """Yields a .json file's list item by item. JSON Lines, also in a .json file, are read line by line."""
    if _format(path) == ".json":
        with _opened(path) as file:
            content = file.read()
        try:
            rows = json.loads(content.decode("utf-8-sig"))
        except UnicodeDecodeError:
            yield 1, "", _NO_UTF8
            return
        except RecursionError:
            yield 1, "", NESTED
            return
        except json.JSONDecodeError as error:
            if content.lstrip().startswith(b"["):  # a list, and no lines of objects
                yield 1, "", f"not valid JSON ({error})"
                return
        else:
            if not isinstance(rows, list):
                yield 1, json.dumps(rows), "a single object; expected a list of objects"
                return
            yield from ((number, json.dumps(row), "") for number, row in enumerate(rows, start=1))
            return
    with _opened(path) as file:
        for number, line in enumerate(file, start=1):
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
            except UnicodeDecodeError:
                yield number, "", _NO_UTF8
            else:
                if text:
                    yield number, text, ""


def _csv_records(path: Path) -> Iterator[tuple[int, str, str]]:
    """Yields a CSV file's records as JSON objects of strings. An empty cell is null."""
    csv.field_size_limit(2**31 - 1)
    number = 0
    delimiter = "\t" if _format(path) == ".tsv" else ","
    with _opened(path) as file:
        text = (line.decode("utf-8" if index else "utf-8-sig") for index, line in enumerate(file))
        try:
            rows = csv.DictReader(text, delimiter=delimiter, strict=True, skipinitialspace=True)
            rows.fieldnames = [name.strip() for name in rows.fieldnames or ()]
            header_fault = _header_fault(rows.fieldnames, delimiter)
            for number, row in enumerate(rows, start=1):
                fault = "more fields than the header" if row.pop(None, None) else header_fault
                cells = {column: cell or None for column, cell in row.items()}
                yield number, json.dumps(cells), fault
        except UnicodeDecodeError:
            yield number + 1, "", _NO_UTF8
        except csv.Error as error:
            yield number + 1, "", f"not valid CSV ({error})"


def _header_fault(names: Sequence[str], delimiter: str) -> str:
    """Returns why a CSV file's first line does not name its columns; "" if it does."""
    other = re.search(r"[,;\t|]", names[0]) if len(names) == 1 else None
    if other:
        return f"columns separated by {other[0]!r}; expected {delimiter!r}"
    repeated = [name for name in names if names.count(name) > 1]
    if not repeated:
        return ""
    if repeated[0]:
        return f"two columns {repeated[0]!r}"
    return "a first line without a name for each column; expected the columns' names there"


def _main() -> None:
    """Downloads the data set named on the command line into the cache; on failure prints the error and exits with 2."""
    from huggingface_hub import HfApi, constants

    try:
        HfApi().dataset_info(
            sys.argv[1], timeout=constants.HF_HUB_ETAG_TIMEOUT
        )  # `datasets` asks for almost a minute
        _load_from_hub(*sys.argv[1:])
    except Exception as error:
        print(str(error).partition("\n")[0])
        sys.exit(2)
