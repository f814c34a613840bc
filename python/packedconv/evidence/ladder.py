"""The ladder of a CPU: time of every rung, from Algorithm 1 as it stands to the plan."""

import pandas as pd

from packedconv.bench.rungs import NAMES
from packedconv.evidence.cpu_experiments import Experiments
from packedconv.evidence.statistics import interval
from packedconv.layer import sparsity_key
from packedconv.schedule import FIELDS

COLUMNS = [
    *("layer", "sparsity", "rung", *FIELDS, "seconds", "low", "high", "speedup"),
    *("dense_seconds", "dense_layout", "spread", "attempts", "wide", "busy", "left_out"),
]

TITLES = {
    "naive": "Algorithm 1 as it stands",
    "register": "one vector register",
    "tile": "tile of registers",
    "strip": "input copied in strips",
    "prefetch": "next strip prefetched",
    "stream": "output past the caches",
    "aligned": "aligned loads",
    "blocks": "blocks of input channels",
}


def ladder(experiments: Experiments) -> pd.DataFrame:
    """One row per layer, sparsity and rung, with `COLUMNS`, in the order of the rungs.

    seconds: median over the medians of the rounds, low and high its 95 % interval from
    resampling them; speedup: of dense over the rung; spread: the widest of all rungs and dense,
    after so many attempts. A rung that was left out has its reason
    in `left_out` and no times.
    """
    resampled, quality = experiments.resampled(), experiments.quality()
    rows = []
    for name, facts in experiments.measured.items():
        for sparsity in facts["experiment"]["sparsities"]:
            key, sparsity = sparsity_key(sparsity), round(sparsity, 6)
            dense = resampled[name, sparsity, "dense"]
            rungs = {rung["name"]: rung["schedule"] for rung in facts["rungs"][key]}
            for rung in NAMES:
                row = {"layer": name, "sparsity": sparsity, "rung": rung}
                if rung not in rungs:
                    rows.append({**row, "left_out": facts["left_out"][key][rung]})
                    continue
                seconds = resampled[name, sparsity, rung]
                low, high = interval(seconds)
                rows.append(
                    {
                        **row,
                        **rungs[rung],
                        "seconds": seconds[0],
                        "low": low,
                        "high": high,
                        "speedup": dense[0] / seconds[0],
                        "dense_seconds": dense[0],
                        "dense_layout": facts["dense"]["layout"],
                        **quality[name, sparsity],
                    }
                )
    table = pd.DataFrame(rows, columns=COLUMNS)
    whole = ("rows", "vectors", "block_channels", "strip", "attempts")
    return table.astype(dict.fromkeys(whole, "Int64"))
