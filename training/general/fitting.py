"""
The network while it is fitted to given decisions: on a GPU where there is one, else on the CPU.

A GPU likes few large operations, so there every set of tokens has the layout's size, and what a
scenario does not have is masked. It is the same network with the same weights, and what it comes to
differs by rounding alone.
"""

import copy
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from agents.ppo.attention_network import (
    BASIS,
    HOLDS,
    KEY,
    ON,
    ON_CORE,
    OTHER,
    PAUSE,
    PLACES,
    QUERIES,
    RELATIONS,
    SELF,
    SIBLING,
    SMALLEST,
    START,
)  # fmt: skip
from env.sets.token_kernel import legal_slots_batch
from env.sets.tokens import HOST, JOB, SERVICE, VCPU, Layout
from env.simulator.thread_pool import ThreadPool
from training.general.attention import AttentionNetwork, Sets
from training.general.attention_policy import AttentionPolicy
from training.ppo.fast_ppo import one_core, one_core_each
from training.ppo.loss_kernels import ILLEGAL_LOGIT

ROWS_A_THREAD = 64
"""Decisions that a thread takes through the network at once. Fewer cost more in Python's calls than
a further thread brings; a minibatch of 256 keeps four threads busy."""

Loss = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Of decisions int64[B], their scores and values (`Fitting.scores`): what each costs, float32[B],
and something else of each to be told the mean of."""


def fitting_device() -> torch.device:
    """Where networks are fitted: on CUDA's first GPU if there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Fitting:
    """
    A policy's network and the decisions that it is fitted to.

    :param policy: what learns; with padded sets it does when `hand_back` is called
    :param observations: float32[n, size], of the decisions
    :param device: where
    :param padded: whether sets are padded, as a GPU likes them; else the CPU's packed kernels work
    """

    def __init__(
        self, policy: AttentionPolicy, observations: Tensor, device: torch.device, padded: bool
    ):
        self.policy, self.device, self._observations = policy, device, observations
        self._padded = padded
        self.network = copy.deepcopy(policy.network).to(device) if padded else policy.network
        self.trained = list(self.network.parameters())
        self._pool = ThreadPool(1 if padded else torch.get_num_threads(), one_core)

    def scores(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """
        Scores float32[B, n_slots] and values float32[B].

        A slot that is not legal has `ILLEGAL_LOGIT`.

        :param rows: int64[B], some of the decisions
        """
        layout, observations = self.policy.layout, self._observations[rows]
        if self._padded:
            marks = torch.empty(len(rows), len(layout.slots))
            legal_slots_batch(observations.numpy(), layout.offsets, marks.numpy())
            legal = (marks > 0.5).to(self.device)
            logits, values = padded_scores(self.network, observations.to(self.device), layout)
        else:
            sets = Sets(observations.numpy(), layout)
            legal = torch.from_numpy(sets.legal) > 0.5
            logits, values = self.network(sets)
        return torch.where(legal, logits, ILLEGAL_LOGIT), values[:, 0]

    def differentiate(self, rows: Tensor, loss: Loss) -> Tensor:
        """
        Compute the gradient of some decisions' mean loss, into the weights' `grad`.

        On the CPU, threads share the decisions. How they are cut does not depend on the threads,
        so neither do the sums.

        :param rows: int64[B], which decisions
        :param loss: what each of them costs
        :return: the mean of what `loss` tells beside that
        """
        pieces = [rows] if self._padded else rows.split(ROWS_A_THREAD)
        gradients: list[tuple[Tensor, ...]] = [()] * len(pieces)
        told = torch.zeros(len(pieces), device=self.device)

        def of_piece(number: int) -> None:
            losses, also = loss(pieces[number], *self.scores(pieces[number]))
            gradients[number] = torch.autograd.grad(losses.sum() / len(rows), self.trained)
            told[number] = also.detach().sum() / len(rows)

        with one_core_each():
            self._pool.share(of_piece, range(len(pieces)))
        for weight, *parts in zip(self.trained, *gradients, strict=True):
            weight.grad = torch.stack(parts).sum(0)
        return told.sum()

    def hand_back(self) -> None:
        """Give the policy what was learned."""
        if self._padded:
            self.policy.network.load_state_dict(self.network.state_dict())


def any_of(scores: Tensor, slots: Tensor) -> Tensor:
    """
    The log-probabilities of taking any of some slots, float32[B].

    :param scores: float32[B, n_slots], see `Fitting.scores`
    :param slots: int64[B, K]; what is not legal, or named twice, does not count, and where none is
        legal the log-probability is 0, which teaches nothing
    """
    legal = scores > ILLEGAL_LOGIT
    some = torch.zeros_like(legal).scatter_(1, slots, True) & legal
    ours = torch.where(some, scores, ILLEGAL_LOGIT)
    return torch.where(some.any(1), ours.logsumexp(1) - scores.logsumexp(1), 0.0)


def padded_scores(
    network: AttentionNetwork, observations: Tensor, layout: Layout
) -> tuple[Tensor, Tensor]:
    """
    What the network says (`AttentionNetwork.forward`), by torch's own operations.

    Scores float32[B, n_slots], of no meaning where a slot is not legal, and values float32[B, 1].

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
    host, own = x[:, 0], network.from_job(x[:, 2 + n_vcpus :])
    of_vcpus = network.from_vcpu(x[:, 2 : 2 + n_vcpus])
    starts = own[:, :, START] @ torch.from_numpy(BASIS).to(own.device)
    queries = own[:, :, QUERIES].unflatten(2, (3, KEY))
    on_cores = torch.einsum("bjke,bve->bjkv", queries, of_vcpus[:, :, 1:])
    on_cores = on_cores + own[:, :, ON_CORE, None]
    on_cores = on_cores + network.there[:, None] * cores[:, :, None]
    pairs, single = on_cores[:, :, :2].transpose(2, 3).flatten(2), on_cores[:, :, 2]
    pause = own[:, :, PAUSE : PAUSE + 1]
    of_jobs = torch.cat([starts, own[:, :, PLACES], pairs, single, pause], dim=2).flatten(1)
    logits = torch.cat([network.keep(host), of_vcpus[:, :, 0], of_jobs], dim=1)
    return logits, network.value(torch.relu(network.critic(host)))


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
