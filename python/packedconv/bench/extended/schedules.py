"""Every schedule that the plan of a layer may have, and its own with one field changed alone."""

import functools
import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from packedconv import _core
from packedconv import plan as planning
from packedconv.bench.check import Comparison, require_within_bound
from packedconv.bench.contenders import Contender
from packedconv.bench.cpu_experiments import Facts, Groups, Prepared, Row
from packedconv.bench.experiment import Experiment
from packedconv.bench.protocol import minor_faults
from packedconv.layer import Layer
from packedconv.schedule import Schedule
from packedconv.settings import Settings

# Of the plan's own time, in all of so many trials: what takes longer is not timed in rounds.
HOPELESS = 3.0
TRIALS = 4
# A warm-up lasts at least this long. All contenders are of one kind and share input, output and
# threads, so that less is to be warmed than where the rounds go from one library to another.
WARMUP_SECONDS = 0.005
# The plan's own schedule once more, as if it were another: what the rounds tell apart at all.
AGAIN = "plan_again"
SAME = "the layer executes the plan's own"

# From what is asked for to what a plan executes, which may be cut to the layer.
# Raises ValueError for a schedule that the layer does not have.
Executed = Callable[[Schedule], Schedule]


class Change(NamedTuple):
    """A schedule that differs from the plan's own in one field, rows and vectors being one."""

    field: str
    change: str
    schedule: Schedule


class Candidate(NamedTuple):
    """A schedule that is executed.

    rank: its place by the plan's estimate, from 0, the plan's own; None where the plan would
    not choose it. field, change: what alone is changed in the plan's own; empty where more is.
    """

    name: str
    schedule: Schedule
    rank: int | None
    field: str = ""
    change: str = ""


def changes(plan: Schedule, tiles: Iterable[tuple[int, int]], group_channels: int) -> list[Change]:
    """The plan's own schedule with each field changed alone; none of a naive plan.

    tiles: (rows, vectors) that the instruction set has; group_channels: input channels of a group.
    """
    if plan["path"] == "naive":
        return []
    block, strip = plan["block_channels"], plan["strip"]
    other_path = "loose" if plan["path"] == "aligned" else "aligned"
    wanted = [
        *(("tile", f"{rows}x{vectors}", {"rows": rows, "vectors": vectors})
          for rows, vectors in sorted(set(tiles))),
        ("block_channels", "halved", {"block_channels": max(1, block // 2)}),
        ("block_channels", "doubled", {"block_channels": min(2 * block, group_channels)}),
        ("block_channels", "whole", {"block_channels": group_channels}),
        ("strip", "1", {"strip": 1}),
        ("strip", "doubled", {"strip": 2 * strip}),
        ("prefetch", "off" if plan["prefetch"] else "on", {"prefetch": not plan["prefetch"]}),
        ("stream", "off" if plan["stream"] else "on", {"stream": not plan["stream"]}),
        ("path", other_path, {"path": other_path}),
    ]  # fmt: skip
    found = [Change(field, change, {**plan, **values}) for field, change, values in wanted]
    return [change for change in found if change.schedule != plan]


def candidates(
    listed: Sequence[Schedule], changed: Iterable[Change], executed: Executed
) -> tuple[list[Candidate], list[dict[str, Any]]]:
    """What is executed, each schedule once, the plan's own first; and what is not, with reasons.

    listed: what the plan may choose, its own first.
    """
    found: dict[str, Candidate] = {}
    left_out = []
    for rank, schedule in enumerate(listed):
        run = executed(schedule)
        found.setdefault(name_of(run), Candidate(name_of(run), run, rank))
    plan = next(iter(found))
    for field, change, schedule in changed:
        reason = None
        try:
            run = executed(schedule)
        except ValueError as error:
            reason = str(error)
        else:
            if name_of(run) == plan:
                reason = SAME
        if reason is not None:
            left_out.append(
                {"schedule": schedule, "field": field, "change": change, "reason": reason}
            )
            continue
        known = found.get(name_of(run), Candidate(name_of(run), run, None))
        text = f"{known.change}, {change}" if known.field == field else change
        found[known.name] = known._replace(field=field, change=text)
    return list(found.values()), left_out


def name_of(schedule: Schedule) -> str:
    """A schedule as one word: `aligned_4x2_block8_strip1_prefetch`."""
    flags = "".join(f"_{name}" for name in ("prefetch", "stream") if schedule[name])
    return "{path}_{rows}x{vectors}_block{block_channels}_strip{strip}".format(**schedule) + flags


class Reference:
    """The float64 output of a layer, made once for many outputs, and what each may be off by.

    input (N, IC, H, W), weight (OC, IC/groups, K, K). The bound is that of
    `check.compare_with_float64`.
    """

    def __init__(self, layer: Layer, input: torch.Tensor, weight: torch.Tensor) -> None:
        convolve = functools.partial(torch.nn.functional.conv2d, **layer.conv2d_arguments)
        nonzeros = (weight != 0).flatten(1).sum(1).double()
        scale = ((4 + nonzeros.sqrt()) * 2.0**-23).reshape(-1, 1, 1)
        self._exact = convolve(input.double(), weight.double())
        self._bound = convolve(input.double().abs(), weight.double().abs()).mul_(scale)

    def compare(self, output: torch.Tensor) -> Comparison:
        """How far an output (N, OC, H_out, W_out) lies from the reference."""
        error = (output.double() - self._exact).abs_()
        fraction = torch.where(error > 0, error / self._bound, torch.zeros_like(error))
        fraction[torch.isnan(error)] = math.inf
        worst = torch.unravel_index(fraction.argmax(), fraction.shape)
        index = tuple(int(axis) for axis in worst)
        return Comparison(
            float(error.max()),
            *(float(fraction[index]), index, float(output[index])),
            *(float(self._exact[index]), float(self._bound[index])),
        )


def hopeless(names: Sequence[str], trial: Callable[[str], float]) -> dict[str, float]:
    """Of candidates whose trials all take over HOPELESS times the plan's own, the least ratio.

    names: the plan's own first. trial: seconds that a candidate takes. Only what seems hopeless
    is tried again, TRIALS times in all, so that a disturbance leaves nothing out.
    """
    own = math.inf
    least: dict[str, float] = {}
    trying = list(names[1:])
    for _ in range(TRIALS):
        own = min(own, trial(names[0]))
        for name in trying:
            least[name] = min(least.get(name, math.inf), trial(name))
        trying = [name for name in trying if least[name] > HOPELESS * own]
    return {name: least[name] / own for name in trying}


def measure(
    settings: Settings, experiment: Experiment, threads: int
) -> tuple[list[Row], dict[str, Any]]:
    """Rows and facts of one layer.

    facts: `plans`, as of a table of layers; `schedules`, by sparsity key: the candidates that
    were timed, the plan's own first, and what was left out, with the reason; `warmup_seconds`.
    Raises CheckError when an output is wrong.
    """
    layer = experiment.layer
    groups: Groups = {}
    schedules: Facts = {}
    plans: Facts = {}
    with torch.inference_mode():
        prepared = Prepared(settings, experiment, threads)
        out = torch.full(layer.output_shape, 0.0)
        for sparsity, key in zip(experiment.sparsities, prepared.packed, strict=True):
            plan = prepared.plan(key)
            plans[key] = {"schedule": plan.schedule, "facts": plan.facts, "why": plan.why}
            listed = _core.cpu_schedules(**planning.core_arguments(prepared.packed[key], plan.key))
            found, left_out = candidates(
                listed,
                changes(
                    plan.schedule,
                    ((one["rows"], one["vectors"]) for one in listed),
                    layer.in_channels // layer.groups,
                ),
                lambda schedule, key=key: prepared.plan(key, schedule).schedule,
            )
            exact = Reference(layer, prepared.image, prepared.dense[key])
            made = {}
            for one in found:
                made[one.name] = _contender(prepared, key, one, out)
                out.fill_(float("nan"))
                made[one.name].execute()
                require_within_bound(layer, sparsity, exact.compare(out), f"schedule {one.name}")
            slow = hopeless(list(made), lambda name, made=made: _trial(made[name], experiment))
            schedules[key] = {
                "candidates": [one._asdict() for one in found if one.name not in slow],
                "left_out": left_out
                + [
                    {
                        **one._asdict(),
                        "trial_ratio": slow[one.name],
                        "reason": f"over {HOPELESS:g} times the plan's own time in every trial",
                    }
                    for one in found
                    if one.name in slow
                ],
            }
            groups[key] = [one for name, one in made.items() if name not in slow]
            groups[key].append(made[found[0].name]._replace(implementation=AGAIN))
        rows, facts = prepared.measure(groups, _time_block)
    return rows, dict(facts, plans=plans, schedules=schedules, warmup_seconds=WARMUP_SECONDS)


def _contender(prepared: Prepared, key: str, candidate: Candidate, out: torch.Tensor) -> Contender:
    # The compiled plan itself: the weight keeps fewer plans than there are candidates.
    plan, image = prepared.plan(key, candidate.schedule), prepared.image
    places = (image.data_ptr(), image.stride(), 0, False, out.data_ptr(), out.stride())
    execute = functools.partial(plan.core.execute, *places, prepared.threads)
    return Contender(candidate.name, "packed", execute)


def _trial(contender: Contender, experiment: Experiment) -> float:
    protocol = experiment.protocol
    seconds, _ = _time_block(contender, protocol["trial_executions"], protocol["warmup_executions"])
    return min(seconds)


def _time_block(
    contender: Contender, executions: int, warmup_executions: int
) -> tuple[list[float], int]:
    """As protocol.time_executions, with the shorter warm-up."""
    execute, clock = contender.execute, time.perf_counter
    warm = clock() + WARMUP_SECONDS
    for _ in range(max(1, warmup_executions)):
        execute()
    while clock() < warm:
        execute()
    seconds, faults = [], minor_faults()
    for _ in range(executions):
        begin = clock()
        execute()
        seconds.append(clock() - begin)
    return seconds, minor_faults() - faults
