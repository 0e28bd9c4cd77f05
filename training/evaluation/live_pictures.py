"""
The pictures of a run on a real machine, drawn from its records, and its TensorBoard scalars.

    python -m training.evaluation.live_pictures report

The three plots are those of a simulated run (`training.evaluation.plots`). A process of its own,
because the live agent imports neither matplotlib nor tensorboard.
"""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event as TensorBoardEvent
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from deploy.records.recorder import (
    PICTURE_FILE,
    Sample,
    guard_levels,
    read_events,
    read_samples,
    scenario_of,
    started_at_s,
)
from deploy.records.run_report import read_intervals, read_report
from env.errors import InputError, exit_on_bad_input, os_reason
from env.inputs.commandline import OneLineParser
from training.evaluation.live_recording import recording_of
from training.evaluation.plots import plot_run


def write_scalars(folder: Path) -> None:
    """
    Write a TensorBoard file: a step is a millisecond of the run.

    :param folder: the run's report folder; the file goes there too
    """
    started_s = started_at_s(folder)
    writer = EventFileWriter(str(folder))
    scalars = [
        (sample.time_s, name, value)
        for sample in read_samples(folder)
        for name, value in _scalars(sample)
    ]
    levels = guard_levels(read_events(folder))
    scalars += [(time_s, "live/guard_level", float(level)) for time_s, level in levels]
    scalars += [(row.end_s, "live/p95_us", row.p95_us) for row in read_intervals(folder)]
    for time_s, name, value in scalars:
        summary = Summary(value=[Summary.Value(tag=name, simple_value=value)])
        writer.add_event(
            TensorBoardEvent(
                wall_time=started_s + time_s, step=round(1000 * time_s), summary=summary
            )
        )
    writer.close()


def _scalars(sample: Sample) -> Iterator[tuple[str, float]]:
    yield "live/qps", sample.qps
    yield "live/memcached_cpu", sample.cpu_cores
    yield "live/memcached_vcpus", float(len(sample.service_cores))
    yield "live/jobs_running", float(sum(job.state == "running" for job in sample.jobs.values()))
    for name, job in sample.jobs.items():
        yield f"cpu_s/{name}", job.cpu_s


def parser() -> argparse.ArgumentParser:
    """The command line."""
    line = OneLineParser(
        prog="python -m training.evaluation.live_pictures",
        description="Draw a run on a real machine.",
    )
    line.add_argument("folder", type=Path, help="the run's report folder")
    return line


def main(argv: Sequence[str] | None = None) -> None:
    """
    Draw from the command line.

    :param argv: command line, the process's own if none is given
    """
    folder = parser().parse_args(argv).folder
    with exit_on_bad_input():
        scenario = scenario_of(folder)
        try:
            title = f"{read_report(folder)['policy']} on {scenario.name}"
            plot_run(recording_of(folder), scenario, title, folder / PICTURE_FILE)
            write_scalars(folder)
        except InputError:
            raise
        except OSError as error:
            raise InputError(f"{folder}: cannot be drawn to ({os_reason(error)})") from error
        except (ValueError, KeyError) as error:
            raise InputError(
                f"{folder}: its run cannot be drawn from what the files say"
            ) from error


if __name__ == "__main__":
    main()
