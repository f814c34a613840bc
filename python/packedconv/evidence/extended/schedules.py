"""The schedules of CPU plans by time, over the plan's own choice, and what the choice misses."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pandas as pd

from packedconv.bench.spread import spread
from packedconv.evidence import rounds
from packedconv.evidence.cpu_experiments import Experiments
from packedconv.evidence.statistics import interval, resampled_median
from packedconv.layer import sparsity_key
from packedconv.schedule import FIELDS

# The control's name in the samples, and why a change is none: as the bench has them.
AGAIN = "plan_again"
SAME = "the layer executes the plan's own"
# Fields that are changed alone, in the order of the figure.
CHANGED = ("tile", "block_channels", "strip", "prefetch", "stream", "path")

PLAN, LISTED, ALONE, CONTROL = "plan", "listed", "changed", "control"
FASTER, SLOWER, INCONCLUSIVE = "faster", "slower", "inconclusive"

COLUMNS = [
    *("layer", "sparsity", "role", "rank", "field", "change", *FIELDS),
    *("seconds", "low", "high", "ratio", "ratio_low", "ratio_high", "verdict", "spread", "wide"),
    *("attempts", "busy", "trial_ratio", "left_out"),
]
REGRET_COLUMNS = [
    *("layer", "sparsity", "timed", "listed", "best", "best_any"),
    *("regret", "regret_low", "regret_high", "verdict"),
    *("regret_any", "regret_any_low", "regret_any_high", "verdict_any"),
    *("held_out", "held_out_low", "held_out_high"),
    *("most_field", "most_change", "most_loss", "most_low", "most_high", "most_in_trial"),
]


def schedule_table(experiments: Experiments) -> pd.DataFrame:
    """One row per layer, sparsity and schedule with `COLUMNS`, the plan's own first.

    role: the plan's own; listed, which the plan may choose (rank: by its estimate); changed, its
    own with `field` alone changed, which it would not choose; control, its own once more.
    seconds: median over the medians of the rounds, low and high its 95 % interval from resampling
    them. ratio: over the plan's own; verdict: on the ratio against 1. A schedule that was left
    out has its reason in `left_out` and no times; where trials decided, trial_ratio is the least.
    """
    resampled, quality = experiments.resampled(), experiments.quality()
    medians = _round_values(experiments)
    rows: list[dict[str, Any]] = []
    for name, sparsity, schedules in _points(experiments):
        widest = experiments.facts[name]["experiment"]["widest_spread"]
        point = {"layer": name, "sparsity": sparsity}
        how = {key: quality[name, sparsity][key] for key in ("attempts", "busy")}
        plan = schedules["candidates"][0]
        own = resampled[name, sparsity, plan["name"]]
        control = {"name": AGAIN, "schedule": plan["schedule"], "rank": None}
        for candidate in [*schedules["candidates"], control]:
            seconds = resampled[name, sparsity, candidate["name"]]
            low, high = interval(seconds)
            compared = _compared("ratio", seconds / own)
            if candidate is plan:
                compared["verdict"] = ""
            width = spread(medians[name, sparsity, candidate["name"]])
            rows.append(
                {
                    **point,
                    "role": _role(candidate, plan),
                    **_what(candidate),
                    **{"seconds": seconds[0], "low": low, "high": high},
                    **compared,
                    **{"spread": width, "wide": width > widest},
                    **how,
                }
            )
        for left_out in schedules["left_out"]:
            rows.append(
                {
                    **point,
                    "role": _role(left_out, plan),
                    **_what(left_out),
                    "trial_ratio": left_out.get("trial_ratio"),
                    "left_out": left_out["reason"],
                }
            )
    table = pd.DataFrame(rows, columns=COLUMNS)
    whole = ("rank", "rows", "vectors", "block_channels", "strip", "attempts")
    return table.astype(dict.fromkeys(whole, "Int64"))


def regret_table(experiments: Experiments, table: pd.DataFrame) -> pd.DataFrame:
    """One row per layer and sparsity with `REGRET_COLUMNS`: how far the choice is from the best.

    regret: time of the plan's own choice over that of the best that it may choose (`best`),
    regret_any over the best of all that was timed, both picked and timed in the same rounds, so
    rather too large. held_out: as `regret`, but in each round over the schedule that is best in
    the other rounds: the median over the rounds; it may be below 1. most_*: the field that costs
    most when it is changed alone, to `most_change`; most_in_trial: known from trials only.
    """
    resampled, medians = experiments.resampled(), _round_values(experiments)
    rows = []
    for name, sparsity, schedules in _points(experiments):
        names = [one["name"] for one in schedules["candidates"]]
        listed = [one["name"] for one in schedules["candidates"] if one["rank"] is not None]
        own, plan = resampled[name, sparsity, names[0]], medians[name, sparsity, names[0]]
        row = {"layer": name, "sparsity": sparsity, "timed": len(names), "listed": len(listed)}
        for suffix, among in (("", listed), ("_any", names)):
            best = min(among, key=lambda one: resampled[name, sparsity, one][0])
            row[f"best{suffix}"] = best
            found = _compared(f"regret{suffix}", own / resampled[name, sparsity, best])
            row[f"verdict{suffix}"] = found.pop("verdict")
            row.update(found)
        held = resampled_median(
            held_out_ratios(plan, np.stack([medians[name, sparsity, one] for one in listed]))
        )
        low, high = interval(held)
        row.update(held_out=held[0], held_out_low=low, held_out_high=high)
        mine = table[(table["layer"] == name) & (table["sparsity"] == sparsity)]
        rows.append({**row, **most_costly(mine)})
    return pd.DataFrame(rows, columns=REGRET_COLUMNS)


def held_out_ratios(plan: np.ndarray, candidates: np.ndarray) -> np.ndarray:
    """Of each round the plan's time over that of the candidate that is best without this round.

    plan (rounds,), candidates (count, rounds): seconds; best by the median over the other rounds.
    """
    ratios = np.ones(len(plan))
    for number in range(len(plan)):
        others = np.delete(candidates, number, axis=1)
        best = np.median(others, axis=1).argmin()
        ratios[number] = plan[number] / candidates[best, number]
    return ratios


def most_costly(rows: pd.DataFrame) -> dict[str, Any]:
    """`most_*` of REGRET_COLUMNS from the rows of one layer and sparsity; empty without changes.

    A change that trials left out counts with the least ratio of these, which has no interval.
    """
    changed = rows[rows["field"].isin(CHANGED)]
    losses = changed["ratio"].astype(float).fillna(changed["trial_ratio"].astype(float))
    if losses.isna().all():
        return {}
    most = changed.loc[losses.idxmax()]
    return {
        "most_field": most["field"],
        "most_change": most["change"],
        "most_loss": losses.max(),
        "most_low": most["ratio_low"],
        "most_high": most["ratio_high"],
        "most_in_trial": bool(pd.isna(most["ratio"])),
    }


def verdict(low: float, high: float) -> str:
    """What the interval of a ratio of times says of it against 1."""
    if high < 1:
        return FASTER
    return SLOWER if low > 1 else INCONCLUSIVE


def with_regrets(table: pd.DataFrame, regrets: pd.DataFrame) -> pd.DataFrame:
    """The table of a figure's CSV: every schedule, and with the plan's own what it misses."""
    point = ["layer", "sparsity"]
    renamed = regrets.rename(
        columns={"verdict": "regret_verdict", "verdict_any": "regret_any_verdict"}
    )
    merged = table.merge(renamed, on=point, how="left", validate="many_to_one")
    added = [column for column in merged if column not in table]
    merged[added] = merged[added].astype(object).where(merged["role"] == PLAN)
    return merged


def _points(experiments: Experiments) -> Iterator[tuple[str, float, Mapping[str, Any]]]:
    for name, facts in experiments.measured.items():
        for sparsity in facts["experiment"]["sparsities"]:
            yield name, round(sparsity, 6), facts["schedules"][sparsity_key(sparsity)]


def _round_values(experiments: Experiments) -> dict[rounds.Point, np.ndarray]:
    """Seconds of every round, in the order of the rounds, by `rounds.POINT`."""
    found = rounds.round_medians(experiments.samples).sort_values("round")
    return {
        (str(key[0]), float(key[1]), str(key[2])): values.to_numpy()
        for key, values in found.groupby(rounds.POINT)["seconds"]
    }


def _role(candidate: Mapping[str, Any], plan: Mapping[str, Any]) -> str:
    if candidate.get("name") == AGAIN:
        return CONTROL
    if candidate.get("name") == plan["name"]:
        return PLAN
    return ALONE if candidate.get("rank") is None else LISTED


def _what(candidate: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "rank": candidate.get("rank"),
        "field": candidate.get("field", ""),
        "change": candidate.get("change", ""),
        **candidate["schedule"],
    }


def _compared(name: str, ratios: np.ndarray) -> dict[str, Any]:
    low, high = interval(ratios)
    return {
        name: ratios[0],
        f"{name}_low": low,
        f"{name}_high": high,
        "verdict": verdict(low, high),
    }
