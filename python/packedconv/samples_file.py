"""CSV files of a run: their columns, and reading and writing them."""

import csv
import hashlib
import io
import typing

from packedconv.files import atomic_write
from packedconv.seal import sealed_text

SAMPLE_COLUMNS = (
    "device",
    "run",
    "layer",
    "batch",
    "in_channels",
    "out_channels",
    "height",
    "width",
    "kernel_size",
    "stride",
    "padding",
    "dilation",
    "groups",
    "sparsity",
    "nonzeros",
    "implementation",
    "layout",
    "threads",
    "round",
    "execution",
    "seconds",
)
# Of an experiment on a CPU: attempt counts from 0 how often a point was measured.
EXPERIMENT_COLUMNS = (*SAMPLE_COLUMNS[:-3], "attempt", *SAMPLE_COLUMNS[-3:])
ERROR_COLUMNS = (
    "device",
    "run",
    "layer",
    "in_channels",
    "out_channels",
    "sparsity",
    "nonzeros",
    "implementation",
    "reference",
    "weights",
    "max_abs_error",
    "bound_fraction",
)
CEILING_COLUMNS = ("device", "run", "quantity", "threads", "trial", "value")
# A mapping of the paper's kernel, in files and in facts.
MAPPING_FIELDS = ("col_per_warp", "rows_per_thread", "warps_per_block", "slices")
# A timed execution on a GPU, here and in samples.csv, is the mean within a pair of events of
# executions_per_pair. seconds: empty where `skipped` says why a mapping was not timed.
ABLATION_COLUMNS = (
    *("device", "run", "layer", "out_channels", "sparsity", "nonzeros"),
    *MAPPING_FIELDS,
    *("executions_per_pair", "execution", "seconds", "skipped"),
)
# bytes: what the experiment has to move at least; empty for the convolutions.
FIXED_COST_COLUMNS = (
    *("device", "run", "layer", "out_channels", "experiment", "implementation"),
    *("slices", "nonzeros", "bytes", "executions_per_pair", "execution", "seconds", "skipped"),
)

# What a run may have timed, "sparse" and "dense" always. On a CPU those two only. On a GPU
# "sparse" is the paper's kernel in its best mapping at each sparsity, "sparse_column" the column
# kernel, and the dense ones are PyTorch's: "dense" with its default settings, the others as their
# names say.
REQUIRED_IMPLEMENTATIONS = ("sparse", "dense")
IMPLEMENTATIONS = (
    *("sparse", "sparse_column", "dense", "dense_fp32", "dense_tf32", "dense_fp16"),
    "dense_channels_last",
)

_MAKE_AGAIN = "delete it and make it again"

Row = typing.Mapping[str, typing.Any]


def format_csv(rows: typing.Iterable[Row], columns: typing.Sequence[str]) -> str:
    """Rows as CSV text. Numbers keep every digit; None becomes an empty field."""
    stream = io.StringIO()
    writer = csv.DictWriter(stream, columns, lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow(row)
    return stream.getvalue()


def write_text(path: str, text: str) -> None:
    """Write text under a temporary name and rename it."""
    with atomic_write(path) as temporary, open(temporary, "w", encoding="utf-8") as stream:
        stream.write(text)


def write_facts(path: str, facts: typing.Mapping[str, typing.Any]) -> None:
    """Write facts as JSON that holds its own digest (packedconv.seal)."""
    write_text(path, sealed_text(facts))


def read_rows(path: str, columns: typing.Sequence[str]) -> typing.List[typing.Dict[str, str]]:
    """Rows of a CSV file as text.

    Raises ValueError that names the file when its columns differ, a row is cut or it is no text.
    """
    try:
        return _read_rows(path, columns)
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path}: expected CSV, got {error}; {_MAKE_AGAIN}") from error


def _read_rows(path: str, columns: typing.Sequence[str]) -> typing.List[typing.Dict[str, str]]:
    with open(path, encoding="utf-8", newline="") as stream:
        reader = csv.DictReader(stream)
        if reader.fieldnames != list(columns):
            raise ValueError(
                f"{path}: expected the columns {', '.join(columns)}, "
                f"got {', '.join(reader.fieldnames or ['none'])}; {_MAKE_AGAIN}"
            )
        rows = []
        for number, row in enumerate(reader, start=2):
            if None in row or None in row.values():
                raise ValueError(
                    f"{path}, line {number}: expected {len(columns)} fields; {_MAKE_AGAIN}"
                )
            rows.append(dict(row))
    return rows


def text_sha256(text: str) -> str:
    """SHA-256 of text in UTF-8."""
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def read_text(path: str) -> typing.Optional[str]:
    """A file's text, or None when there is none. Raises ValueError when it is no text."""
    try:
        with open(path, encoding="utf-8", newline="") as stream:
            return stream.read()
    except FileNotFoundError:
        return None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: expected text, got {error}; {_MAKE_AGAIN}") from error
