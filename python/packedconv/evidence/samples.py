"""Loading measured results, results/<device>/<run>/, and checking that they are whole."""

import dataclasses
import functools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from packedconv.layer import Layer
from packedconv.samples_file import (
    ERROR_COLUMNS,
    IMPLEMENTATIONS,
    REQUIRED_IMPLEMENTATIONS,
    SAMPLE_COLUMNS,
    read_text,
    text_sha256,
)
from packedconv.seal import require_intact
from packedconv.settings import layers_of, load_settings, settings_hash

TEXT = {
    *("device", "run", "layer", "implementation", "layout", "reference", "weights"),
    *("experiment", "skipped"),
}
FLOATS = {"sparsity", "seconds", "max_abs_error", "bound_fraction"}

# The layer's name, then its other fields as columns.
SHAPE = ["layer", *Layer._fields[1:]]
GROUP = ["layer", "sparsity", "implementation"]

MEASURE_AGAIN = "measure the layer again"


@dataclasses.dataclass(frozen=True)
class Results:
    """One set of results: what was asked for, and what was measured.

    settings: settings.json; samples: one row per execution, seconds, of "sparse" and "dense",
        which is what the paper compares; every_sample: of all implementations;
    errors: one row per (layer, sparsity, implementation, reference, weights);
    peaks: peak_flops (FLOP/s), bandwidth (bytes/s), threads, and the busy_layers, which were
        timed while the machine was busy with something else;
    facts: the facts that ride with each layer's samples, by layer name.
    """

    folder: Path
    settings: dict[str, Any]
    samples: pd.DataFrame
    errors: pd.DataFrame
    peaks: dict[str, Any]
    facts: dict[str, dict[str, Any]]
    every_sample: pd.DataFrame

    @classmethod
    def load(cls, folder: str | Path) -> "Results":
        """Load and check results/<device>/<run>/.

        Raises FileNotFoundError when a file is missing and ValueError when one is not whole
        or disagrees with settings.json.
        """
        folder = Path(folder)
        _require_file(folder / "settings.json")
        settings = load_settings(str(folder / "settings.json"))
        _require_device(folder / "settings.json", settings)
        protocol = settings["protocol"]
        samples = load_samples(
            folder / "samples.csv", rounds=protocol["rounds"], executions=protocol["executions"]
        )
        errors = load_errors(folder / "errors.csv")
        for name, frame in (("samples.csv", samples), ("errors.csv", errors)):
            require_same(
                folder / name, "device", set(frame["device"]), {settings["device"]["name"]}
            )
            require_same(folder / name, "run", set(frame["run"]), {settings["run"]})
            asked = {layer["name"] for layer in settings["layers"]}
            require_same(folder / name, "layer", set(frame["layer"]), asked)
            asked = {round(value, 6) for value in settings["sparsities"]}
            require_same(folder / name, "sparsity", set(frame["sparsity"]), asked)
        measured = layers(samples)
        for layer in layers_of(settings):
            if measured[layer.name] != layer:
                raise file_error(
                    folder / "samples.csv",
                    f"layer {layer.name}",
                    f"{layer} as in settings.json",
                    f"{measured[layer.name]}",
                    "measure again with these settings",
                )
        facts = {
            name: load_json(folder / "bench" / f"{name}.json") for name in samples["layer"].unique()
        }
        for name, found in facts.items():
            if found.get("settings_hash", settings_hash(settings)) != settings_hash(settings):
                raise file_error(
                    folder / "settings.json",
                    "content",
                    f"the settings that {name} was measured with",
                    "others",
                    "delete it and run again; it is written anew",
                )
        peaks = load_peaks(folder / "peaks.json")
        _require_collected(folder, peaks)
        compared = samples["implementation"].isin(REQUIRED_IMPLEMENTATIONS)
        two = samples[compared].reset_index(drop=True)
        return cls(folder, settings, two, errors, peaks, facts, samples)

    @property
    def device(self) -> str:
        """Name of the device that was measured."""
        return self.settings["device"]["name"]

    @property
    def title(self) -> str:
        """Title of the device, for captions."""
        return self.settings["device"].get("title") or self.device

    @property
    def family(self) -> str:
        """Device family, such as a100, tegra-x1 or cpu."""
        return self.settings["device"]["family"]

    @property
    def run(self) -> str:
        """Name of this set of results."""
        return self.settings["run"]

    def execution(self, implementations: Sequence[str] = REQUIRED_IMPLEMENTATIONS) -> str:
        """What an execution of the protocol is on a GPU, for captions; empty for a CPU, where
        it is just that."""
        if self.settings["device"]["kind"] == "cpu":
            return ""
        counts = [
            count
            for facts in self.facts.values()
            for name, found in facts.get("implementations", {}).items()
            if name in implementations
            for count in found["executions_per_pair"].values()
        ]
        several = "several"
        if counts:
            low, high = min(counts), max(counts)
            several = f"{low}" if low == high else f"{low} to {high}"
        return f"each the mean over a pair of events around {several} of them"

    @functools.cached_property
    def layers(self) -> dict[str, Layer]:
        """Measured layers by name, by ascending out_channels."""
        return layers(self.samples)


def layers(samples: pd.DataFrame) -> dict[str, Layer]:
    """The layers that `samples` holds, by name, by ascending out_channels."""
    shapes = samples[SHAPE].drop_duplicates().sort_values(["out_channels", "layer"])
    return {
        row["layer"]: Layer(row["layer"], *(int(row[column]) for column in SHAPE[1:]))
        for _, row in shapes.iterrows()
    }


def load_samples(
    path: str | Path, rounds: int | None = None, executions: int | None = None
) -> pd.DataFrame:
    """Load samples.csv or one bench/<layer>.csv: one row per execution, seconds.

    Checked: exact columns, no empty value, positive seconds, one device, one run, one shape per
    layer, "sparse" and "dense" for every (layer, sparsity), a further implementation for every
    sparsity of a layer or for none, and for each of them every round with every execution once.
    `rounds` and `executions` are the expected counts; without them every group must have as
    many as the largest.
    Rows come sorted by layer, sparsity, implementation, round, execution.

    Raises FileNotFoundError or ValueError.
    """
    path = Path(path)
    samples = load_csv(path, SAMPLE_COLUMNS, nullable=())
    if not (samples["seconds"] > 0).all():
        lowest = samples["seconds"].min()
        raise file_error(path, "seconds", "positive values", f"{lowest}", MEASURE_AGAIN)
    _require_one(path, samples, "device")
    _require_one(path, samples, "run")
    _require_implementations(path, samples)
    shapes = samples[SHAPE].drop_duplicates()
    if shapes["layer"].duplicated().any():
        name = shapes["layer"][shapes["layer"].duplicated()].iloc[0]
        raise file_error(path, f"layer {name}", "one shape", "several shapes", MEASURE_AGAIN)
    constant = samples.groupby(GROUP)[["layout", "threads", "nonzeros"]].nunique()
    for column in constant:
        mixed = constant.index[constant[column] > 1]
        if len(mixed):
            where = _name(mixed[0])
            raise file_error(path, where, f"one value of {column}", "several", MEASURE_AGAIN)
    _require_complete(path, samples, rounds, executions)
    return samples.sort_values(
        ["out_channels", *GROUP, "round", "execution"], ignore_index=True, kind="stable"
    )


def load_errors(path: str | Path) -> pd.DataFrame:
    """Load errors.csv or one check/<layer>.csv: maximum absolute errors.

    Only bound_fraction may be empty. Raises FileNotFoundError or ValueError.
    """
    path = Path(path)
    errors = load_csv(path, ERROR_COLUMNS, nullable=("bound_fraction",))
    if not (errors["max_abs_error"] >= 0).all():
        lowest = errors["max_abs_error"].min()
        raise file_error(path, "max_abs_error", "no negative value", f"{lowest}", "check again")
    _require_one(path, errors, "device")
    _require_one(path, errors, "run")
    key = [*GROUP, "reference", "weights"]
    if errors.duplicated(key).any():
        twice = errors.loc[errors.duplicated(key), key].iloc[0].to_dict()
        raise file_error(path, f"row {twice}", "once", "several times", "check the layer again")
    return errors.sort_values(["out_channels", *key], ignore_index=True, kind="stable")


def load_peaks(path: str | Path) -> dict[str, Any]:
    """Load peaks.json: peak_flops (FLOP/s), bandwidth (bytes/s), threads, busy_layers.

    Raises FileNotFoundError or ValueError.
    """
    path = Path(path)
    peaks = load_json(path, ("peak_flops", "bandwidth", "busy_layers"))
    for key in ("peak_flops", "bandwidth"):
        value = peaks[key]
        if not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
            raise file_error(
                path, key, "a positive number", repr(value), "measure the ceilings again"
            )
    return peaks


def against_dense(errors: pd.DataFrame) -> pd.DataFrame:
    """The rows of "sparse" against a dense convolution: of each layer the one in FP32.

    On a CPU that is "dense". On a GPU PyTorch's default may use TF32, whose rounding is a
    thousand times the errors that the paper prints, so "dense_fp32" stands there; "dense" only
    for a layer that it did not run for at all.
    Raises ValueError for a layer that has "dense_fp32" for some of its rows.
    """
    sparse = errors[errors["implementation"] == "sparse"]
    chosen = []
    for layer, rows in sparse.groupby("layer", sort=False):
        default, fp32 = (rows[rows["reference"] == name] for name in ("dense", "dense_fp32"))
        if len(fp32) and len(fp32) != len(default):
            raise ValueError(
                f"errors of layer {layer}: expected {len(default)} against dense_fp32, as many as "
                f"against dense, got {len(fp32)}; check the layer again"
            )
        chosen.append(fp32 if len(fp32) else default)
    return pd.concat(chosen) if chosen else sparse


def clock_notes(facts: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Sentences on the clocks of a GPU, from the facts of its layers: which moved, slowed by
    what, and of which it is not known. Nothing where they were steady."""
    moved = [name for name, one in facts.items() if one.get("clocks_moved")]
    unknown = [name for name, one in facts.items() if one.get("clocks_moved") is None]
    slowed: dict[str, list[str]] = {}
    for name, one in facts.items():
        for reason in one.get("throttled") or []:
            slowed.setdefault(reason, []).append(name)
    return [
        *([f"The clocks moved while {', '.join(moved)} was timed."] if moved else []),
        *(
            f"The GPU was slowed by {reason} while {', '.join(names)} was timed."
            for reason, names in sorted(slowed.items())
        ),
        *(
            [f"Clocks unknown: nothing tells whether they moved for {', '.join(unknown)}."]
            if unknown
            else []
        ),
    ]


def file_error(path: Path, what: str, expected: str, got: str, step: str) -> ValueError:
    """What is wrong with a file, and the next step."""
    return ValueError(f"{path}: {what}: expected {expected}, got {got}; {step}")


def _name(group: Iterable[Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in zip(GROUP, group, strict=True))


def _require_file(path: Path) -> None:
    if not path.is_file():
        raise FileNotFoundError(f"{path}: not found; measure first, or name another folder")


def load_json(path: Path, keys: Iterable[str] = ()) -> dict[str, Any]:
    """An object in a JSON file that has these keys. Raises FileNotFoundError or ValueError."""
    _require_file(path)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise file_error(path, "content", "JSON", f"{error}", "measure again") from None
    if not isinstance(content, dict):
        raise file_error(path, "content", "an object", type(content).__name__, "measure again")
    require_intact(str(path), content, "delete it and run again; it is made anew")
    for key in keys:
        if key not in content:
            raise file_error(path, f"key {key}", "a value", "none", "measure again")
    return content


def load_csv(path: Path, columns: Sequence[str], nullable: Sequence[str]) -> pd.DataFrame:
    """A CSV file of exactly these columns with the types of their values; `nullable` ones may
    have none (text stays empty).

    Raises FileNotFoundError, or ValueError that names the line.
    """
    _require_file(path)
    try:
        header = list(pd.read_csv(path, nrows=0).columns)
        text = pd.read_csv(path, dtype="str", keep_default_na=False)
    except pd.errors.EmptyDataError:
        header = []
    except (UnicodeDecodeError, pd.errors.ParserError) as error:
        raise file_error(path, "content", "CSV", str(error).strip(), MEASURE_AGAIN) from None
    if header != list(columns):
        got = ",".join(header) or "none"
        raise file_error(path, "columns", ",".join(columns), got, "measure again")
    if text.empty:
        raise file_error(path, "rows", "at least one", "none", "measure again")
    parsed = {}
    for column in columns:
        values = text[column]
        empty = values == ""
        if column not in nullable and empty.any():
            line = int(empty.to_numpy().argmax()) + 2
            raise file_error(path, f"{column} in line {line}", "a value", "none", MEASURE_AGAIN)
        if column in TEXT:
            parsed[column] = values
            continue
        whole = column not in FLOATS
        numbers = pd.to_numeric(values.where(~empty, "nan"), errors="coerce")
        wrong = (numbers.isna() | ~numbers.abs().lt(math.inf)) & ~empty
        if whole:
            wrong |= numbers.ne(numbers.round()) & ~empty
        if wrong.any():
            line = int(wrong.to_numpy().argmax()) + 2
            expected = "an integer" if whole else "a finite number"
            got = repr(values.iloc[line - 2])
            raise file_error(path, f"{column} in line {line}", expected, got, MEASURE_AGAIN)
        integer = "Int64" if column in nullable else "int64"
        parsed[column] = numbers.astype(integer if whole else "float64")
    frame = pd.DataFrame(parsed)
    if "sparsity" in frame:
        # The same sparsity must compare equal whatever arithmetic wrote it.
        frame["sparsity"] = frame["sparsity"].round(6)
    return frame


def _require_collected(folder: Path, peaks: dict[str, Any]) -> None:
    """Raise ValueError where a file is no longer what was collected.

    An earlier version did not write down what it was.
    """
    for name, digest in peaks.get("files_sha256", {}).items():
        if text_sha256(read_text(str(folder / name)) or "") != digest:
            raise file_error(
                folder / name,
                "content",
                "what was collected with peaks.json",
                "a file changed since",
                "delete it and run again; it is collected anew",
            )


def _require_device(path: Path, settings: dict[str, Any]) -> None:
    device = settings["device"]
    family = device.get("family")
    if not isinstance(family, str):
        raise file_error(path, "device.family", "a name", repr(family), "measure again")
    # What a statement is judged by hangs on the family: a CPU must not pass for a GPU.
    if (device["kind"] == "cpu") != (family == "cpu"):
        expected = "cpu" if device["kind"] == "cpu" else "a family other than cpu"
        raise file_error(
            path,
            f"device.family of kind {device['kind']}",
            expected,
            repr(family),
            "mend config/devices/ and measure again",
        )


def _require_one(path: Path, frame: pd.DataFrame, column: str) -> None:
    values = sorted(frame[column].unique())
    if len(values) != 1:
        got = ", ".join(values)
        raise file_error(
            path, column, "one value", got, f"keep each {column} in a folder of its own"
        )


def require_same(path: Path, what: str, got: set[Any], expected: set[Any]) -> None:
    """Raises ValueError where a file has other values than settings.json asks for."""
    if got != expected:
        raise file_error(
            path,
            what,
            f"{sorted(expected)} as in settings.json",
            f"{sorted(got)}",
            "measure again with these settings",
        )


def _require_implementations(path: Path, samples: pd.DataFrame) -> None:
    for layer, rows in samples.groupby("layer"):
        every = set(rows["implementation"])
        for sparsity, group in rows.groupby("sparsity"):
            got = set(group["implementation"])
            expected = every | set(REQUIRED_IMPLEMENTATIONS)
            if got != expected or not got <= set(IMPLEMENTATIONS):
                raise file_error(
                    path,
                    f"layer {layer}, sparsity {sparsity}, implementation",
                    " and ".join(sorted(expected & set(IMPLEMENTATIONS))),
                    " and ".join(sorted(got)),
                    MEASURE_AGAIN,
                )


def _require_complete(
    path: Path, samples: pd.DataFrame, rounds: int | None, executions: int | None
) -> None:
    if samples.duplicated([*GROUP, "round", "execution"]).any():
        twice = samples.loc[samples.duplicated([*GROUP, "round", "execution"])].iloc[0]
        where = _name(twice[GROUP])
        what = f"{where}, round {twice['round']}, execution {twice['execution']}"
        raise file_error(path, what, "one row", "several", MEASURE_AGAIN)
    per_group = samples.groupby(GROUP)["round"].nunique()
    expected = rounds if rounds is not None else int(per_group.max())
    if (per_group != expected).any():
        where = per_group.index[per_group != expected][0]
        got = f"{per_group[where]}"
        raise file_error(path, _name(where), f"{expected} rounds", got, MEASURE_AGAIN)
    per_round = samples.groupby([*GROUP, "round"]).size()
    expected = executions if executions is not None else int(per_round.max())
    if (per_round != expected).any():
        where = per_round.index[per_round != expected][0]
        what = f"{_name(where[:-1])}, round {where[-1]}"
        raise file_error(path, what, f"{expected} executions", f"{per_round[where]}", MEASURE_AGAIN)


def distribution(spec: dict) -> str:
    """A distribution of settings.json in words: `uniform on [0, 1)`."""
    name = spec.get("distribution", "not stated")
    if "low" in spec:
        return f"{name} on [{spec['low']:g}, {spec['high']:g})"
    if "bound" in spec:
        bound = str(spec["bound"]).replace("^2", "²").replace("*", "·")
        return f"{name} on ±{bound}"
    return name


def dense_layouts(samples: pd.DataFrame) -> str:
    """The layouts of the dense side, with their numbers of output channels where they differ."""
    dense = samples[samples["implementation"] == "dense"]
    channels = dense.groupby("layout")["out_channels"].unique()
    if len(channels) == 1:
        return str(channels.index[0])
    return ", ".join(
        f"{layout} (OC\u00a0{listed(sorted(values))})" for layout, values in channels.items()
    )


def shapes(layers: list[Layer]) -> str:
    """N, IC and H × W of layers that differ in OC: `N = 1, IC = 32, 256×256, K = 3`."""
    texts = []
    for layer in layers:
        text = f"N = {layer.batch}, IC = {layer.in_channels}, {layer.height}×{layer.width}"
        text += f", K = {layer.kernel_size}"
        if (layer.stride, layer.padding) != (1, layer.kernel_size // 2):
            text += f", stride {layer.stride}, padding {layer.padding}"
        if (layer.dilation, layer.groups) != (1, 1):
            text += f", dilation {layer.dilation}, groups {layer.groups}"
        if text not in texts:
            texts.append(text)
    return "; ".join(texts)


def listed(values: Iterable[Any]) -> str:
    """Values as a reader sees them: `48, 64, 80`."""
    return ", ".join(str(value) for value in values)
