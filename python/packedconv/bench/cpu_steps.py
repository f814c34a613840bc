"""The steps of layers beside the paper's, on a CPU, one at a time: layers and ladder."""

import os
import typing

from packedconv.bench.experiment import Experiment, load_experiment
from packedconv.bench.lock import measurement_lock
from packedconv.bench.steps import (
    SCHEMA,
    keep_in_archive,
    load_stamp,
    require_space,
    require_stamped_extension,
    thread_count,
    warn_of_faults,
)
from packedconv.device import DeviceError, require
from packedconv.samples_file import (
    EXPERIMENT_COLUMNS,
    format_csv,
    text_sha256,
    write_facts,
    write_text,
)
from packedconv.script import experiment_parser, run
from packedconv.settings import Settings, load_settings, settings_hash

# More than any layer has: the schedules of a plan, a ladder's rungs, the contenders of a table.
_MOST_CONTENDERS = 100

# Rows of the samples file and facts of a layer on so many threads.
Measure = typing.Callable[[Settings, Experiment, int], typing.Any]


# settings, experiment text, stamp, samples and facts to write, as `layers` takes them.
Step = typing.Callable[[Settings, str, str, str, str], None]


def run_step(description: typing.Optional[str], step: Step) -> None:
    """The whole of a script: its arguments, and a step."""

    def main() -> None:
        options = experiment_parser(description).parse_args()
        step(
            load_settings(options.settings),
            options.experiment,
            options.stamp,
            options.out,
            options.facts,
        )

    run(main)


def layers(
    settings: Settings, experiment_text: str, stamp_path: str, out: str, facts_path: str
) -> None:
    """Time one layer of a table on a CPU; writes `out` and facts.

    experiment_text: as `bench.experiment` reads it. Where the processor lacks the instruction
    set that the experiment is about, `out` has no rows and the facts say so.
    Raises DeviceError for another device, CheckError when an output is wrong, ValueError for an
    environment that is not the experiment's, OSError where there is no space.
    """

    def measure(*arguments: typing.Any) -> typing.Any:
        from packedconv.bench.cpu_experiments import measure_layer

        return measure_layer(*arguments)

    write_measured(settings, experiment_text, stamp_path, out, facts_path, measure)


def ladder(
    settings: Settings, experiment_text: str, stamp_path: str, out: str, facts_path: str
) -> None:
    """Time every rung of the ladder for one layer on a CPU; writes `out` and facts.

    Arguments and errors as in `layers`.
    """

    def measure(*arguments: typing.Any) -> typing.Any:
        from packedconv.bench.cpu_experiments import measure_ladder

        return measure_ladder(*arguments)

    write_measured(settings, experiment_text, stamp_path, out, facts_path, measure)


def write_measured(
    settings: Settings,
    experiment_text: str,
    stamp_path: str,
    out: str,
    facts_path: str,
    measure: Measure,
) -> None:
    """Write the rows of an experiment on a layer, the facts first. Arguments as in `layers`."""
    require_cpu(settings)
    experiment = load_experiment(experiment_text)
    device = require(settings["device"])
    stamp = load_stamp(stamp_path)
    with measurement_lock(settings["device"]["name"]):
        # torch first: whichever OpenMP library comes first serves both.
        import torch  # noqa: F401

        from packedconv import _core
        from packedconv.bench.machine import comparable_facts, require_environment

        require_environment(experiment.environment)
        require_space(out, _most_rows(experiment))
        require_stamped_extension(stamp_path, stamp)
        facts = {
            "schema": SCHEMA,
            "settings_hash": settings_hash(settings),
            "stamp": stamp,
            "experiment": experiment.record(),
        }
        isa = experiment.environment.get("PACKEDCONV_ISA", "auto")
        rows = []  # type: typing.List[typing.Dict[str, typing.Any]]
        if isa != "auto" and isa not in _core.isas():
            facts["skipped"] = f"this processor has {', '.join(_core.isas())}, not {isa}"
        else:
            facts["comparable"] = comparable_facts()
            rows, measured = measure(settings, experiment, thread_count(settings, device))
            facts.update(measured)
            warn_of_faults(experiment.layer, measured["page_faults_per_execution"])
        text = format_csv(rows, EXPERIMENT_COLUMNS)
        facts["samples_sha256"] = text_sha256(text)
        os.makedirs(os.path.dirname(os.path.abspath(facts_path)), exist_ok=True)
        write_facts(facts_path, facts)
        write_text(out, text)
        keep_in_archive([facts_path, out], facts["samples_sha256"])


def require_cpu(settings: Settings) -> None:
    """Raise DeviceError for settings of another device than a CPU."""
    if settings["device"]["kind"] != "cpu":
        raise DeviceError(
            "device: expected a CPU, which this experiment is about, got "
            f"{settings['device']['name']}; name one: --config device=cpu"
        )


def _most_rows(experiment: Experiment) -> int:
    protocol = experiment.protocol
    attempts = (1 + experiment.repeats) * len(experiment.sparsities)
    return _MOST_CONTENDERS * attempts * protocol["rounds"] * protocol["executions"]
