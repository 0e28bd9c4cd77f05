"""
Draws a scenario and its profile from the family, as the content of their YAML files.

Everything follows from the name `family-<purpose>-<seed>-<index>`. A purpose's scenarios are drawn
from random numbers of its own, so that no two purposes ever draw the same. `env.scenario` and
`env.simulator.profile` take the names, so that every command does.
"""

from __future__ import annotations

import copy
import functools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from env.errors import InputError
from env.family.arrivals import draw_arrivals
from env.inputs.yaml_files import read_yaml
from env.physics.steady_service import SteadyService

_ENV = Path(__file__).resolve().parents[1]
FAMILY_FILE = _ENV / "scenarios" / "family.yaml"

NAME = re.compile(r"family-([a-z]+)-(\d{1,18})-(\d{1,9})")

MEASURED_VCPUS = 4
"""What others do to the memory system was measured on so many vCPUs."""

MOST_DEVIATIONS = 2.0
"""Traits lie so many standard deviations of their spread from the measured ones at most."""

# What traits may be at most; drawn jobs are less serial than `env.simulator.profile.LIMITS` allow.
TRAIT_LIMITS = {"serial_fraction": 0.95, "smt": 1.0, "cores_per_thread": 4.0}
SERVICE_LIMITS = {"smt": 1.0, "batch_smt": 1.0, "cpu_limit": 1.0, "equal_share": 0.95}
WORK, OVERHEAD = "work_s", "launch_overhead_s"
OVERHEAD_SHARE = 0.3  # of its work, the most that a job's start costs

ALONE = 0.9
"""p95 of memcached's refuge at the largest load, without a single job, over its SLO at most."""

Content = dict[str, Any]


@dataclass(frozen=True)
class Drawn:
    """
    One scenario of the family; not to be changed.

    :param scenario: content of its scenario file
    :param profile: content of its profile file
    :param span_s: time in which its jobs arrive, where they do not come together [s]
    """

    scenario: Content
    profile: Content
    span_s: float


def is_drawn(name: str) -> bool:
    """
    Whether a scenario or a profile of that name is drawn from the family.

    :param name: what a user or a scenario says
    """
    return NAME.fullmatch(name) is not None


def drawn_names(purpose: str, seed: int, count: int) -> list[str]:
    """
    The names of the first scenarios that a seed draws.

    :param purpose: what they are for, one of `training`, `selection` and `report`
    :param seed: of the draws, 0 or more
    :param count: how many
    """
    return [f"family-{purpose}-{seed}-{index}" for index in range(count)]


@functools.lru_cache(maxsize=1024)
def draw(name: str) -> Drawn:
    """
    The scenario of a name.

    :param name: `family-<purpose>-<seed>-<index>`
    :raises InputError: if there is no such purpose
    """
    family = _read(FAMILY_FILE)
    match = NAME.fullmatch(name)
    assert match is not None, name
    purpose, seed, index = match[1], int(match[2]), int(match[3])
    purposes = list(family["purposes"])
    if purpose not in purposes:
        raise InputError(f"{name}: purpose {purpose!r}; allowed are {', '.join(purposes)}")
    key = purposes.index(purpose), index
    return _draw(
        name, family, purpose, np.random.default_rng(np.random.SeedSequence(seed, spawn_key=key))
    )


@functools.cache
def generic_traits() -> dict[str, tuple[float, float]]:
    """
    What is known of a job before it is measured: that it might be any of those the family draws.

    :return: for each of a job's traits its median over the family's measured jobs, and how widely
        they scatter around it, their own spreads included: a standard deviation of ln(value)
    """
    ranges = _read(FAMILY_FILE)["jobs"]
    jobs = [
        job for profile in ranges["measured"] for job in _measured_profile(profile)["jobs"].values()
    ]
    found = {}
    measured_of_all = [trait for trait in jobs[0] if all(trait in job for job in jobs)]
    for trait in measured_of_all:
        logs = np.log([job[trait]["value"] for job in jobs])
        own = np.array([job[trait]["spread"] for job in jobs])
        middle = float(np.median(logs))
        spread = math.sqrt(float(np.mean((logs - middle) ** 2 + own**2)))
        found[trait] = math.exp(middle), spread
    low, high = map(math.log, ranges["work_s"])
    # Evenly distributed in the logarithm, as the family draws it.
    found[WORK] = math.exp((low + high) / 2.0), (high - low) / math.sqrt(12.0)
    return found


def _draw(name: str, family: Content, purpose: str, rng: np.random.Generator) -> Drawn:
    sizes = family["purposes"][purpose]
    vcpus = int(rng.choice(sizes["vcpus"]))
    n_jobs = int(rng.integers(sizes["jobs"][0], sizes["jobs"][1] + 1))
    smt = vcpus % 2 == 0 and rng.random() < family["machine"]["smt_share"]
    memory_mib = int(vcpus * _between(family["machine"]["memory_mib_per_vcpu"], rng))
    machine = {
        "vcpus": vcpus,
        "smt_siblings": [[vcpu, vcpu + 1] for vcpu in range(0, vcpus, 2)] if smt else [],
        "memory_mib": memory_mib,
    }
    profile, service, load = _draw_service(family["service"], vcpus, smt, rng)
    profile["host"]["straggling"]["value"] = _between(family["machine"]["straggling"], rng)
    jobs, traits = _draw_jobs(family["jobs"], vcpus, n_jobs, memory_mib, rng)
    work_s = [trait[WORK]["value"] for trait in traits.values()]
    ranges, generator = family["arrivals"], family["load_generator"]
    rate = ranges["work_rate_per_vcpu"] * vcpus
    ratio = _between(
        ranges["saturated" if rng.random() < ranges["saturated_share"] else "any"], rng
    )
    span_s = sum(work_s) / (rate * ratio)
    arrival_s = draw_arrivals(ranges, n_jobs, span_s, rng).tolist()
    for job, at_s in zip(jobs, arrival_s, strict=True):
        job["arrival_s"] = at_s
    # Long enough for three times what the machine needs, and for one job alone.
    longest_s = 3.0 * sum(work_s) / rate + 2.0 * max(work_s) + 3.0 * span_s + 60.0
    load["duration_s"] = math.ceil(max(longest_s, arrival_s[-1] + longest_s / 2.0))
    calm = rng.random() < 0.5
    scenario = {
        "name": name,
        "description": f"{vcpus} vCPUs, {n_jobs} jobs, drawn for {purpose}.",
        "profile": name,
        "machine": machine,
        "service": service,
        "jobs": jobs,
        "load": load,
        "control": {"period_s": 0.025, "hold_s": 1.0, "wake_qps": load["qps_max"] / 12.0},
        "regulation": {
            "share_service_cores": bool(rng.random() < family["service"]["sharing_share"]),
            "service_dwell_s": 1.0 if calm else 0.5,
            "pause_dwell_s": 30.0 if calm else 5.0,
            "move_dwell_s": 1.0 if calm else 0.5,
        },
    }
    # Drawn last, so that all else is as it would be without a load generator.
    if max(service["core_choices"][-1]) < vcpus - 1 and rng.random() < generator["share"]:
        profile["costs"] = _draw_load_generator(generator, traits, rng)
    profile |= {
        "name": name,
        "description": f"Drawn for {purpose}; nothing was measured.",
        "sources": ["env/scenarios/family.yaml"],
        "fit_error": {},
        "jobs": traits,
    }
    return Drawn(scenario, profile, span_s)


def _draw_load_generator(
    ranges: Content, traits: dict[str, Content], rng: np.random.Generator
) -> Content:
    """What the load costs a machine that carries it, on its last vCPU; jobs are told, too."""
    for job in traits.values():
        job["interruption"] = _drawn(_between(ranges["interruption"], rng))
    names = ("service_exponent", "client_cpu", "client_exponent", "agent_cpu")
    return {name: _drawn(_between(ranges[name], rng)) for name in names}


def _drawn(value: float) -> Content:
    """A parameter that no measured machine's spread says anything of."""
    return {"value": value, "spread": 0.1, "source": "env/scenarios/family.yaml"}


def _draw_service(
    ranges: Content, vcpus: int, smt: bool, rng: np.random.Generator
) -> tuple[Content, Content, Content]:
    """
    The profile without its jobs, memcached, and its load.

    A memcached that could not hold its SLO without a single job is drawn again: no scheduler can
    help it, so that nothing is learned or shown there.
    """
    while True:
        profile, service, load = _draw_any_service(ranges, vcpus, smt, rng)
        traits = {
            name: parameter["value"]
            for section in (profile["service"], profile["host"])
            for name, parameter in section.items()
        }
        siblings = [vcpu ^ 1 if smt else -1 for vcpu in range(vcpus)]
        alone = SteadyService(traits, service["threads"], siblings)
        if alone.p95_us(service["core_choices"][-1], load["qps_max"]) <= ALONE * service["slo_us"]:
            return profile, service, load


def _draw_any_service(
    ranges: Content, vcpus: int, smt: bool, rng: np.random.Generator
) -> tuple[Content, Content, Content]:
    """What `_draw_service` draws, whether memcached could hold its SLO or not."""
    measured = str(rng.choice(ranges["measured"]))
    base = _measured_profile(measured)
    service = _scattered(base["service"], 1.0, SERVICE_LIMITS, rng)
    host = _scattered(base["host"], 1.0, {}, rng)
    capacity = service["core_capacity_qps"]
    capacity["value"] *= _between(ranges["capacity"], rng)
    threads = int(rng.integers(ranges["threads"][0], ranges["threads"][1] + 1))
    # On a machine of two vCPUs memcached's refuge may be all of it.
    largest = min(threads, vcpus if vcpus == 2 and rng.random() < 0.5 else vcpus - 1)
    choices = [list(range(size)) for size in range(1, largest + 1)]
    serves_qps = _serves(service, largest, smt)
    # So many requests in flight that the refuge's plateau is that of the measured one.
    like = _read(FAMILY_FILE.with_name(f"{measured}.yaml"))
    refuge, pairs = like["service"]["core_choices"][-1], like["machine"].get("smt_siblings")
    wide = _serves(base["service"], len(refuge), bool(pairs))
    service["outstanding"]["value"] *= serves_qps / wide
    narrower = min(1.0, MEASURED_VCPUS / vcpus)
    for name in ("batch_latency", "pressure_latency"):
        service[name]["value"] *= narrower
    overflow = min(largest + 1, vcpus - 1)
    most_qps = int(serves_qps * _between(ranges["most_load"], rng))
    profile = {
        "service": service,
        "host": host,
        "vm_speed": dict(base["vm_speed"]),
        "scatter": base.get("scatter"),
    }
    return (
        profile,
        {
            "threads": threads,
            "slo_us": round(like["service"]["slo_us"] * _between(ranges["slo"], rng)),
            "core_choices": choices,
            "overflow_cores": list(range(overflow)) if overflow > largest else [],
        },
        {
            "qps_min": max(1, int(most_qps * _between(ranges["least_load"], rng))),
            "qps_max": most_qps,
            "interval_s": round(_between(ranges["interval_s"], rng), 1),
        },
    )


def _draw_jobs(
    ranges: Content, vcpus: int, n_jobs: int, memory_mib: int, rng: np.random.Generator
) -> tuple[list[Content], dict[str, Content]]:
    """The jobs and their traits, those of measured jobs within their spreads."""
    measured = [
        (name, traits)
        for profile in ranges["measured"]
        for name, traits in _measured_profile(profile)["jobs"].items()
    ]
    shortest_s, longest_s = ranges["work_s"]
    work_s = np.array([_between(ranges["work_s"], rng) for _ in range(n_jobs)])
    work_s *= _between(ranges["work_s_per_vcpu"], rng) * vcpus / work_s.sum()
    jobs, traits = [], {}
    for index, own_s in enumerate(work_s.clip(shortest_s, longest_s).tolist()):
        kind, base = measured[int(rng.integers(len(measured)))]
        # `_draw_load_generator` draws interruptions, for every job of a machine or for none.
        base = {trait: known for trait, known in base.items() if trait != "interruption"}
        drawn = _scattered(base, ranges["spread"], TRAIT_LIMITS, rng)
        drawn[WORK]["value"] = own_s
        drawn[OVERHEAD]["value"] = min(drawn[OVERHEAD]["value"], OVERHEAD_SHARE * own_s)
        drawn["sensitivity"]["value"] *= min(1.0, MEASURED_VCPUS / vcpus)
        drawn["cores_per_thread"]["value"] = max(1.0, drawn["cores_per_thread"]["value"])
        name = f"{kind}-{index + 1}"
        traits[name] = drawn
        jobs.append(
            {
                "name": name,
                "command": ["true"],  # drawn jobs exist in the simulator only
                "threads": _draw_threads(vcpus, ranges["one_thread_share"], rng),
                "memory_mib": max(1, int(memory_mib * _between(ranges["memory_share"], rng))),
            }
        )
    return jobs, traits


def _draw_threads(vcpus: int, one_thread_share: float, rng: np.random.Generator) -> list[int]:
    """Allowed thread counts: one, powers of two up to the vCPUs, or a few and all as well."""
    if rng.random() < one_thread_share:
        return [1]
    powers = [1 << power for power in range(vcpus.bit_length()) if 1 << power <= vcpus]
    few = list(range(1, min(vcpus, MEASURED_VCPUS) + 1))
    return powers if rng.random() < 0.4 else sorted({*few, *powers, vcpus})


def _serves(service: Content, vcpus: int, smt: bool) -> float:
    """What the first vCPUs serve at most; siblings serve less than two vCPUs [requests/s]."""
    paired = vcpus // 2 * 2 if smt else 0
    worth = vcpus - paired + paired * service["smt"]["value"]
    return float(service["core_capacity_qps"]["value"] * worth)


def _scattered(
    parameters: Content, scale: float, limits: dict[str, float], rng: np.random.Generator
) -> Content:
    """Parameters of a profile, drawn from their spreads."""
    drawn = copy.deepcopy(parameters)
    for name, parameter in drawn.items():
        off = float(np.clip(rng.standard_normal(), -MOST_DEVIATIONS, MOST_DEVIATIONS))
        value = parameter["value"] * math.exp(scale * parameter["spread"] * off)
        parameter["value"] = min(value, limits.get(name, math.inf))
    return drawn


def _between(range_: Sequence[float], rng: np.random.Generator) -> float:
    """A number from a range, by its logarithm where the ends differ by a factor of 4 or more."""
    low, high = range_
    if high < 4.0 * low:
        return float(rng.uniform(low, high))
    return math.exp(rng.uniform(math.log(low), math.log(high)))


def _measured_profile(name: str) -> Content:
    """A profile of a measured machine; the one of a scenario has its scenario's name."""
    return _read(_ENV / "simulator" / "profiles" / f"{name}.yaml")


@functools.cache
def _read(path: Path) -> Content:
    """A shipped YAML file, read once."""
    content: Content = read_yaml(path, "a shipped file")
    return content
