"""
Compiles the kernels that play a machine's runs, so that nobody has to wait for them later.

    python -m training.refinement.kernels

numba takes half a minute for them, once after an update; a characterisation that had to wait would
have that much less time to measure in.
"""

from __future__ import annotations

import numpy as np

import agents
from env.codes import DONE
from env.scenario import Scenario, load_scenario
from env.simulator.machine import EpisodeFactory, SimulatedMachine
from training.calibration.replay import EVENT, play
from training.evaluation.episodes import EpisodeStart, run_episode
from training.evaluation.timeline import TimelineRecorder
from training.refinement.live_replay import room_of
from training.refinement.predict_run import begin_steal_at


def compile_kernels(scenario: Scenario) -> None:
    """
    Call each kernel of a prediction once: whatever jobs it is of, they are the same ones.

    :param scenario: any on a machine with as many vCPUs
    """
    factory = EpisodeFactory(scenario, room=room_of(scenario))
    recorder = TimelineRecorder(scenario)
    machine = SimulatedMachine(factory)
    run_episode(machine, agents.make("static"), EpisodeStart(1, 1), recorder=recorder)
    hosts, targets = factory.new_hosts(1), factory.new_targets(1)
    factory.begin(hosts, targets, 0, 1, np.random.default_rng(1))
    begin_steal_at(hosts, 0, 0.0)
    hosts["true_state"] = DONE  # or what is played would have no end
    count = len(scenario.jobs)
    nobody, no_time_s = np.full(count, -1), np.zeros(count)
    play(hosts, np.zeros(1, EVENT), nobody, no_time_s, True, np.zeros(count), np.zeros(1))


if __name__ == "__main__":
    compile_kernels(load_scenario("local"))
