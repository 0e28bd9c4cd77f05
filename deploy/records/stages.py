"""Where requests spent their time in a run, process by process: waiting, and being served."""

import statistics
from collections import defaultdict
from collections.abc import Iterable

from deploy.linux.group_sensor import PROXY
from deploy.records.recorder import MEMCACHED, Sample
from env.scenario import Service
from env.telemetry import Stages


def typical(samples: Iterable[Sample], service: Service) -> dict[str, dict[str, float]]:
    """
    The median of what the samples show, by process; of a group without a proxy also of all members.

    :param samples: of a run
    :param service: of its scenario
    :return: fields of `Stages`; nothing where the latency tap did not run
    """
    found: dict[str, list[Stages]] = defaultdict(list)
    for one in samples:
        if one.wait_us is not None and one.service_us is not None:
            whole = MEMCACHED if service.proxy is None else PROXY
            found[whole].append(Stages(one.wait_us, one.service_us))
        for number, stages in enumerate(one.members, 1):
            if stages is not None:
                found[f"member {number}"].append(stages)
    return {
        name: Stages(*map(statistics.median, zip(*each, strict=True)))._asdict()
        for name, each in found.items()
    }
