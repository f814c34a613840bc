"""Writing a figure as .pdf, .png and the plotted data as .csv beside it."""

import pathlib

import pandas as pd
from matplotlib.figure import Figure

from packedconv.files import atomic_write

# Dates and versions out, so that the same data gives the same bytes.
_METADATA = {
    ".pdf": {"Creator": None, "Producer": None, "CreationDate": None},
    ".png": {"Software": None},
}


def trio(out: str | pathlib.Path) -> tuple[pathlib.Path, pathlib.Path, pathlib.Path]:
    """The three files of a figure, from any one of them. ValueError for another suffix."""
    out = pathlib.Path(out)
    if out.suffix not in (".pdf", ".png", ".csv"):
        raise ValueError(f"out: expected a name that ends in .pdf, .png or .csv, got {out}")
    return out.with_suffix(".pdf"), out.with_suffix(".png"), out.with_suffix(".csv")


def save_figure(figure: Figure, data: pd.DataFrame, out: str | pathlib.Path) -> None:
    """Write `figure` and `data`, the values it shows, as the trio that `out` names."""
    pdf, png, csv = trio(out)
    for path in (pdf, png):
        with atomic_write(path) as temporary:
            figure.savefig(temporary, metadata=_METADATA[path.suffix])
    with atomic_write(csv) as temporary:
        data.to_csv(temporary, index=False, lineterminator="\n")
