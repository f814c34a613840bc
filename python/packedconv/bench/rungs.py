"""The ladder of a CPU schedule: from Algorithm 1 as it stands to the plan, one idea at a time."""

import typing

from packedconv.schedule import Schedule

# An execution that takes longer is timed once a round: the lowest rungs.
SLOW_SECONDS = 0.05


class Rung(typing.NamedTuple):
    """A schedule of the ladder, and the rung that brought what it has more than the one before."""

    name: str
    schedule: Schedule


# Fields of the plan's schedule that each rung takes over, beginning with one register.
_STEPS = (
    ("tile", ("rows", "vectors")),
    ("strip", ("strip",)),
    ("prefetch", ("prefetch",)),
    ("stream", ("stream",)),
    ("aligned", ("path",)),
    ("blocks", ("block_channels",)),
)
NAMES = ("naive", "register") + tuple(name for name, _ in _STEPS)
SAME = "the plan does without"


def climb(
    plan: Schedule,
    executed: typing.Callable[[Schedule], Schedule],
    group_channels: int,
) -> typing.Tuple[typing.List[Rung], typing.Dict[str, str]]:
    """The rungs up to the plan's schedule, and those left out with the reason.

    executed: what a plan with a schedule executes, which may be cut to the layer; raises
    ValueError for a schedule that the layer does not have. group_channels: input channels of a
    group. A rung that executes what the one before does is left out; what one changes that
    cannot run by itself comes with the next. The last rung is the plan.
    Raises ValueError where the layer has no schedule for the first two rungs.
    """
    if plan["path"] == "naive":
        return [Rung("naive", executed(plan))], {name: SAME for name in NAMES if name != "naive"}
    current = dict(
        plan,
        path="loose",
        rows=1,
        vectors=1,
        block_channels=group_channels,
        strip=1,
        prefetch=False,
        stream=False,
    )
    naive = executed(dict(current, path="naive"))
    rungs = [Rung("naive", naive), Rung("register", executed(current))]
    left_out = {}  # type: typing.Dict[str, str]
    for name, fields in _STEPS:
        following = dict(current, **{field: plan[field] for field in fields})
        if following == current:
            left_out[name] = SAME
            continue
        current = following
        try:
            schedule = executed(current)
        except ValueError as error:
            left_out[name] = f"comes with the next: {error}"
            continue
        if schedule == rungs[-1].schedule:
            left_out[name] = SAME
        else:
            rungs.append(Rung(name, schedule))
    return rungs, left_out
