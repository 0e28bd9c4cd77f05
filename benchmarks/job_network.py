"""
An actor-critic shared by the jobs, which does not care how many jobs or vCPUs there are.

One small network reads every job: what the job is and does, and what the machine does. The mean of
what it says of all jobs feeds the choice of memcached's vCPUs and the value. An edit of a job is
scored by its own description (kind, threads, weight, size of the set) against what was said of that
job, so jobs and vCPUs share all weights. The features are those of `env.observation`, with each
row of vCPUs told as how many, how many of memcached's, and how crowded.
"""

from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from stable_baselines3 import PPO
from torch import nn

from env.action import CORES, JOB, KIND, KINDS, THREADS, WEIGHT
from env.codes import BACKGROUND, PLACE, SERVICE, START
from env.observation import GLOBAL_FEATURES, JOB_FEATURES
from env.simulator.machine import EpisodeFactory
from training.ppo.adam import Adam
from training.ppo.masked_policy import KEEP_BIAS, MaskedActorCriticPolicy

WIDTH = 32
OVERLAPS = 2  # with memcached's vCPUs, and with all jobs'


def layers(*widths: int) -> nn.Sequential:
    """Linear layers with a ReLU after each."""
    pairs = pairwise(widths)
    return nn.Sequential(*(part for a, b in pairs for part in (nn.Linear(a, b), nn.ReLU())))


class SharedReader(nn.Module):
    """
    Reads the machine and every job with the same weights.

    :param traits: float32[J, T], what never changes about a job
    :param vcpus: C
    """

    traits: torch.Tensor

    def __init__(self, traits: torch.Tensor, vcpus: int):
        super().__init__()
        self.vcpus = vcpus
        self.register_buffer("traits", traits)
        machine = GLOBAL_FEATURES + 1
        self.job = layers(machine + JOB_FEATURES + 1 + OVERLAPS + traits.shape[1], WIDTH, WIDTH)
        self.machine = layers(machine + WIDTH, 2 * WIDTH, WIDTH)

    def forward(self, features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """
        Read a batch.

        :param features: float32[B, n_features], see `env.observation`
        :return: the machine float32[B, WIDTH], the jobs float32[B, J, WIDTH], and for each vCPU
            whether memcached holds it and how many jobs do, float32[B, OVERLAPS, C]
        """
        count, vcpus = len(self.traits), self.vcpus
        shared, rest = features[:, :GLOBAL_FEATURES], features[:, GLOBAL_FEATURES:]
        service, jobs = rest[:, :vcpus], rest[:, vcpus:].reshape(len(rest), count, -1)
        cores = jobs[:, :, JOB_FEATURES:]
        held = torch.stack((service, cores.sum(1)), dim=1)
        machine = torch.cat((shared, service.mean(1, keepdim=True)), dim=1)
        told = (
            machine[:, None].expand(-1, count, -1),
            jobs[:, :, :JOB_FEATURES],
            cores.mean(2, keepdim=True),
            cores @ held.transpose(1, 2) / vcpus,
            self.traits.expand(len(rest), -1, -1),
        )
        read = self.job(torch.cat(told, dim=2))
        return self.machine(torch.cat((machine, read.mean(1)), dim=1)), read, held


class JobNetwork(nn.Module):
    """
    The actor's logits and the critic's last hidden layer, where SB3 expects its `mlp_extractor`.

    :param factory: says which jobs, vCPUs and edits there are
    """

    edits: torch.Tensor
    sets: torch.Tensor
    places: torch.Tensor

    def __init__(self, factory: EpisodeFactory):
        super().__init__()
        machine, rows = factory.scenario.machine, torch.from_numpy(factory.table.rows.copy())
        traits = torch.from_numpy(factory.profile.job_array(factory.scenario.job_names)).log()
        traits = (traits - traits.mean(0)) / (traits.std(0) + 1e-6)
        columns = (KIND, JOB, CORES, WEIGHT, THREADS)
        kind, job, cores, weight, threads = (rows[:, column] for column in columns)
        sets = (cores[:, None] >> torch.arange(machine.vcpus) & 1).float()
        described = [nn.functional.one_hot(kind, len(KINDS)).float(), sets.mean(1, keepdim=True)]
        background = ((kind == START) | (kind == PLACE)) & (weight == BACKGROUND)
        described += [background.float()[:, None], threads[:, None].float() / machine.vcpus]
        # What differs only by its job is described once.
        both, kinds = torch.cat((*described, sets), dim=1).unique(dim=0, return_inverse=True)
        self.register_buffer("edits", both[:, : -machine.vcpus].contiguous())
        self.register_buffer("sets", both[:, -machine.vcpus :].contiguous())
        speaker = torch.where(kind > SERVICE, job, len(traits))
        self.register_buffer("places", speaker * len(both) + kinds)
        self.actor = SharedReader(traits.float(), machine.vcpus)
        self.critic = SharedReader(traits.float(), machine.vcpus)
        self.describe = layers(self.edits.shape[1], WIDTH)
        self.weigh = nn.Linear(WIDTH, WIDTH)
        self.weigh_overlaps = nn.Linear(WIDTH, OVERLAPS)
        self.keep = nn.Parameter(torch.tensor(KEEP_BIAS))
        self.latent_dim_pi, self.latent_dim_vf = len(rows), WIDTH

    def forward(self, features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits float32[B, A] and the critic's float32[B, WIDTH]."""
        return self.forward_actor(features), self.forward_critic(features)

    def forward_actor(self, features: torch.Tensor) -> torch.Tensor:
        """float32[B, n_features] to logits float32[B, A]."""
        machine, jobs, held = self.actor(features)
        speakers = torch.cat((jobs, machine[:, None]), dim=1)  # the machine speaks last
        scores = self.weigh(speakers) @ self.describe(self.edits).T / WIDTH**0.5
        overlaps = held @ self.sets.T / self.sets.shape[1]
        scores = scores + self.weigh_overlaps(speakers) @ overlaps
        logits = scores.flatten(1).index_select(1, self.places)
        return torch.cat((logits[:, :1] + self.keep, logits[:, 1:]), dim=1)

    def forward_critic(self, features: torch.Tensor) -> torch.Tensor:
        """float32[B, n_features] to float32[B, WIDTH]."""
        machine: torch.Tensor = self.critic(features)[0]
        return machine


def job_network_policy(factory: EpisodeFactory) -> type[MaskedActorCriticPolicy]:
    """The masked actor-critic over a `JobNetwork` for a factory's jobs, vCPUs and edits."""

    class JobNetworkPolicy(MaskedActorCriticPolicy):
        def __init__(self, *args: Any, **kwargs: Any):
            super().__init__(*args, **kwargs)
            # SB3 puts a linear layer behind the extractor; what comes out are the logits already.
            self.action_net = nn.Identity()
            self.optimizer = Adam(self.parameters(), self.optimizer.param_groups[0]["lr"])

        def _build_mlp_extractor(self) -> None:
            # SB3 says it is its own class, and uses no more of it than this one has.
            self.mlp_extractor = JobNetwork(factory)  # type: ignore[assignment]

    return JobNetworkPolicy


class ModelActor:
    """
    A model as `training.ppo.selection` asks it.

    :param model: whose most likely edits are taken
    """

    def __init__(self, model: PPO):
        self.model = model

    def act(self, observation: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
        """float32[B, size] to int64[B]."""
        return self.model.predict(observation, deterministic=True)[0]
