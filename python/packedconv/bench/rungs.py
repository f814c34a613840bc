"""The ladder of a CPU schedule: from Algorithm 1 as it stands to the plan, one idea at a time."""

import typing

Schedule = typing.Dict[str, typing.Any]


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
    require: typing.Callable[[Schedule], None],
    group_channels: int,
) -> typing.Tuple[typing.List[Rung], typing.Dict[str, str]]:
    """The rungs up to the plan's schedule, and those left out with the reason.

    require: raises ValueError for a schedule that the layer does not have. group_channels:
    input channels of a group. A rung that changes nothing is left out; what one changes that
    cannot run by itself comes with the next. The last rung is the plan.
    Raises ValueError where the layer has no schedule for the first two rungs.
    """
    register = dict(
        plan,
        path="loose",
        rows=1,
        vectors=1,
        block_channels=group_channels,
        strip=1,
        prefetch=False,
        stream=False,
    )
    naive = dict(register, path="naive")
    rungs, left_out = [], {}  # type: typing.List[Rung], typing.Dict[str, str]
    for name, schedule in (("naive", naive), ("register", register)):
        require(schedule)
        rungs.append(Rung(name, schedule))
    current = register
    for name, fields in _STEPS:
        following = dict(current, **{field: plan[field] for field in fields})
        if following == current:
            left_out[name] = SAME
            continue
        current = following
        try:
            require(current)
        except ValueError as error:
            left_out[name] = f"not by itself: {error}"
            continue
        rungs.append(Rung(name, current))
    return rungs, left_out
