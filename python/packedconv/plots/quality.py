"""Lines of a caption that say what was not measured well."""

import pandas as pd


def quality_lines(points: pd.DataFrame) -> list[str]:
    """A line for what still spreads too widely and one for a busy machine, where there is any.

    points: rows with the columns of `Experiments.quality`, of which the first of each layer and
    sparsity counts.
    """
    points = points.drop_duplicates(["layer", "sparsity"])
    lines = []
    wide = points[points["wide"].astype(bool)]
    if not wide.empty:
        found = "; ".join(
            f"{row.layer}, S {row.sparsity:g} ({row.spread:.0%}, measured {row.attempts} "
            f"time{'s' * bool(row.attempts != 1)})"
            for row in wide.itertuples()
        )
        lines.append(f"Rounds still too far apart after the repeats: {found}.")
    busy = points[points["busy"].astype(bool)]
    if not busy.empty:
        found = "; ".join(f"{row.layer}, S {row.sparsity:g}" for row in busy.itertuples())
        lines.append(f"Timed while the machine was busy: {found}.")
    return lines
