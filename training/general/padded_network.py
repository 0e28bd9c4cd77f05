"""
The attention network as a GPU likes it: few large operations.

It is `training.general.attention`'s network with its weights, but every set of tokens has the
layout's size, and what a scenario does not have is masked. What it comes to differs by rounding.
"""

import math

import torch
from torch import Tensor, nn

from agents.ppo.attention_network import HOLDS, ON, OTHER, RELATIONS, SELF, SIBLING, SMALLEST
from env.sets.tokens import HOST, JOB, SERVICE, VCPU, Layout
from training.general.attention import SUMMED, AttentionNetwork
from training.ppo.loss_kernels import ILLEGAL_LOGIT


def padded_scores(network: AttentionNetwork, observations: Tensor, layout: Layout) -> Tensor:
    """
    What the network says (`AttentionNetwork.forward`), by torch's own operations.

    Scores float32[B, n_lists], not yet masked.

    :param network: its weights
    :param observations: float32[B, size]
    :param layout: of the rows
    """
    n_jobs, n_vcpus, _, vcpus_at, _, siblings_at, jobs_at, _, cores_at = layout.offsets
    count = len(observations)
    vcpus = observations[:, vcpus_at:siblings_at].reshape(count, n_vcpus, VCPU)
    jobs = observations[:, jobs_at:cores_at].reshape(count, n_jobs, JOB)
    cores = observations[:, cores_at:].reshape(count, n_jobs, n_vcpus + 1)[:, :, :n_vcpus] > 0.5
    kinds = (
        observations[:, None, :HOST], observations[:, None, HOST : HOST + SERVICE], vcpus, jobs,
    )  # fmt: skip
    there = torch.cat(
        [vcpus.new_ones(count, 2), vcpus[:, :, 0], jobs[:, :, 3:6].sum(2)], dim=1
    ) > 0.5  # fmt: skip
    relations = related(observations[:, siblings_at:jobs_at], vcpus, cores)
    away = torch.where(there, 0.0, ILLEGAL_LOGIT)[:, None, None, :]
    x = torch.cat([embed(one) for embed, one in zip(network.embed, kinds, strict=True)], dim=1)
    layers = (network.qkv, network.biases, network.mix, network.widen, network.narrow)
    for qkv, biases, mix, widen, narrow in zip(*layers, strict=True):
        query, key, value = (
            part.unflatten(2, (network.heads, -1)).transpose(1, 2)
            for part in qkv(normalised(x)).chunk(3, dim=2)
        )
        likeness = query @ key.transpose(2, 3) / math.sqrt(query.shape[3])
        likeness = likeness + (relations @ biases.t()).permute(0, 3, 1, 2) + away
        mixed = likeness.softmax(3) @ value
        x = x + mix(mixed.transpose(1, 2).flatten(2))
        x = x + narrow(torch.relu(widen(normalised(x))))
    x = normalised(x)
    asked = torch.relu(network.ask(x[:, :2].flatten(1)))
    scores: Tensor = network.answer(asked) @ SUMMED.to(x.device)
    return scores


def normalised(x: Tensor) -> Tensor:
    """
    Each token over its root mean square.

    :param x: float32[..., d]
    """
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + float(SMALLEST))


def related(siblings: Tensor, vcpus: Tensor, cores: Tensor) -> Tensor:
    """
    What each token of a set is to each, one of `RELATIONS`, float32[B, N, N, RELATIONS].

    :param siblings: float32[B, C], each vCPU's sibling's number + 1, or 0
    :param vcpus: float32[B, C, VCPU]
    :param cores: bool[B, J, C], which vCPUs are a job's
    """
    (count, n_jobs, n_vcpus), first_job = cores.shape, 2 + vcpus.shape[1]
    size = first_job + n_jobs
    kinds = torch.full((count, size, size), OTHER, device=vcpus.device)
    kinds.diagonal(dim1=1, dim2=2).fill_(SELF)
    numbers = torch.arange(1, n_vcpus + 1, device=vcpus.device)
    paired = siblings[:, :, None] == numbers
    kinds[:, 2:first_job, 2:first_job].masked_fill_(paired, SIBLING)
    held = torch.where(vcpus[:, :, 5] > 0.5, HOLDS, OTHER)
    kinds[:, 1, 2:first_job] = kinds[:, 2:first_job, 1] = held
    on = torch.where(cores, ON, OTHER)
    kinds[:, first_job:, 2:first_job] = on
    kinds[:, 2:first_job, first_job:] = on.transpose(1, 2)
    return nn.functional.one_hot(kinds, RELATIONS).float()
