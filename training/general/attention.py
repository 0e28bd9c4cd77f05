"""The attention network in torch: sets of tokens in, the scores of all slots and a value out."""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from agents.array_archive import Arrays
from agents.ppo.attention_network import FROM_JOB, FROM_VCPU, RELATIONS
from env.sets.token_kernel import legal_slots_batch
from env.sets.tokens import HOST, JOB, SERVICE, VCPU, Layout
from training.general.attention_kernels import (
    attend,
    attend_gradient,
    count_tokens,
    normalise,
    normalise_gradient,
    pack,
    point,
    point_gradient,
)

KEEP_BIAS = 3.0
"""First score of `keep`; see `training.ppo.masked_policy`."""


class Sets:
    """
    The tokens of B decisions, packed.

    :param observations: float32[B, size]
    :param layout: of the rows
    """

    def __init__(self, observations: np.ndarray, layout: Layout):
        count = len(observations)
        self.observations, self.offsets = observations, layout.offsets
        self.legal = np.empty((count, len(layout.slots)), np.float32)
        legal_slots_batch(observations, self.offsets, self.legal)
        self.starts = np.zeros((count + 1, 2), np.int64)
        self.vcpu_starts, self.job_starts = np.zeros((2, count + 1), np.int64)
        count_tokens(observations, self.offsets, self.starts, self.vcpu_starts, self.job_starts)
        self.members = np.empty(self.starts[-1, 0], np.int64)
        self.relations = np.empty(self.starts[-1, 1], np.int8)
        n_vcpus, n_jobs = int(self.vcpu_starts[-1]), int(self.job_starts[-1])
        vcpus = np.empty((n_vcpus, VCPU), np.float32)
        jobs = np.empty((n_jobs, JOB), np.float32)
        self.where = np.empty(n_jobs, np.int64)
        pack(
            observations, self.offsets, self.starts, self.vcpu_starts, self.job_starts,
            self.members, self.relations, vcpus, jobs, self.where,
        )  # fmt: skip
        rows = torch.from_numpy(observations)
        self.kinds = (
            rows[:, :HOST],
            rows[:, HOST : HOST + SERVICE],
            torch.from_numpy(vcpus),
            torch.from_numpy(jobs),
        )
        self.counts = [count, count, n_vcpus, n_jobs]


class Normalised(torch.autograd.Function):
    """Each token over its root mean square (`attention_kernels.normalise`)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """
        The quotients, float32[T, d].

        :param ctx: torch's, keeps what `backward` needs
        :param x: float32[T, d]
        """
        y, scales = torch.empty_like(x), torch.empty(len(x))
        normalise(x.detach().numpy(), y.numpy(), scales.numpy())
        ctx.save_for_backward(y, scales)
        return y

    @staticmethod
    def backward(ctx: Any, by_y: Tensor) -> Tensor:
        """
        The slopes by `x`.

        :param ctx: torch's, with what `forward` has kept
        :param by_y: float32[T, d]
        """
        y, scales = ctx.saved_tensors
        by_x = torch.empty_like(y)
        normalise_gradient(y.numpy(), scales.numpy(), by_y.contiguous().numpy(), by_x.numpy())
        return by_x


class Attended(torch.autograd.Function):
    """Attention within each set (`attention_kernels.attend`)."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, biases: Tensor, sets: Sets) -> Tensor:
        """
        The mixtures of values, float32[T, d].

        :param ctx: torch's, keeps what `backward` needs
        :param qkv: float32[T, 3 d]
        :param biases: float32[heads, RELATIONS]
        :param sets: which tokens belong together
        """
        out = torch.empty(len(qkv), qkv.shape[1] // 3)
        shares = torch.empty(len(biases), len(sets.relations))
        attend(
            qkv.detach().numpy(), biases.detach().numpy(), sets.starts, sets.members,
            sets.relations, out.numpy(), shares.numpy(),
        )  # fmt: skip
        ctx.save_for_backward(qkv, biases, shares)
        ctx.sets = sets
        return out

    @staticmethod
    def backward(ctx: Any, by_out: Tensor) -> tuple[Tensor, Tensor, None]:
        """
        The slopes by queries, keys and values, and by the biases.

        :param ctx: torch's, with what `forward` has kept
        :param by_out: float32[T, d]
        """
        qkv, biases, shares = ctx.saved_tensors
        sets = ctx.sets
        by_qkv, by_biases = torch.zeros_like(qkv), torch.zeros_like(biases)
        attend_gradient(
            qkv.detach().numpy(), biases.detach().numpy(), sets.starts, sets.members,
            sets.relations, shares.numpy(), by_out.contiguous().numpy(), by_qkv.numpy(),
            by_biases.numpy(),
        )  # fmt: skip
        return by_qkv, by_biases, None


class Pointed(torch.autograd.Function):
    """The scores of all slots (`attention_kernels.point`)."""

    @staticmethod
    def forward(
        ctx: Any, keep: Tensor, from_vcpus: Tensor, from_jobs: Tensor, there: Tensor, sets: Sets
    ) -> Tensor:
        """
        Scores, float32[B, n_slots], of no meaning where a slot is not legal.

        :param ctx: torch's, keeps what `backward` needs
        :param keep: float32[B, 1]
        :param from_vcpus: float32[Tv, FROM_VCPU]
        :param from_jobs: float32[Tj, FROM_JOB]
        :param there: float32[3]
        :param sets: the tokens
        """
        logits = torch.empty(sets.legal.shape)
        given = (keep, from_vcpus, from_jobs, there)
        point(
            sets.observations, sets.offsets, sets.legal, sets.vcpu_starts, sets.job_starts,
            sets.where, *(x.detach().numpy() for x in given), logits.numpy(),
        )  # fmt: skip
        ctx.save_for_backward(*given)
        ctx.sets = sets
        return logits

    @staticmethod
    def backward(ctx: Any, slopes: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, None]:
        """
        The slopes by what was given.

        :param ctx: torch's, with what `forward` has kept
        :param slopes: float32[B, n_slots]
        """
        _, from_vcpus, from_jobs, _ = given = ctx.saved_tensors
        sets, results = ctx.sets, [torch.zeros_like(one) for one in given]
        point_gradient(
            sets.observations, sets.offsets, sets.legal, sets.vcpu_starts, sets.job_starts,
            sets.where, from_vcpus.detach().numpy(), from_jobs.detach().numpy(),
            slopes.contiguous().numpy(), *(one.numpy() for one in results),
        )  # fmt: skip
        by_keep, by_vcpus, by_jobs, by_there = results
        return by_keep, by_vcpus, by_jobs, by_there, None


class AttentionNetwork(nn.Module):
    """
    Host, memcached, vCPUs and jobs see each other; edits are scored by the tokens they name.

    :param width: of a token
    :param heads: of the attention
    :param wide: width between a layer's two linear maps
    :param layers: number of layers
    """

    def __init__(self, width: int = 64, heads: int = 4, wide: int = 128, layers: int = 2):
        super().__init__()
        self.heads = heads
        self.embed = nn.ModuleList(
            nn.Linear(numbers, width) for numbers in (HOST, SERVICE, VCPU, JOB)
        )
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(layers))
        self.biases = nn.ParameterList(torch.zeros(heads, RELATIONS) for _ in range(layers))
        self.mix = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.widen = nn.ModuleList(nn.Linear(width, wide) for _ in range(layers))
        self.narrow = nn.ModuleList(nn.Linear(wide, width) for _ in range(layers))
        self.keep = nn.Linear(width, 1)
        self.from_vcpu = nn.Linear(width, FROM_VCPU)
        self.from_job = nn.Linear(width, FROM_JOB)
        self.there = nn.Parameter(torch.zeros(3))
        self.critic = nn.Linear(width, width)
        self.value = nn.Linear(width, 1)
        with torch.no_grad():
            for one in (*self.mix, *self.narrow):
                one.weight *= 0.5
            for one in (self.keep, self.from_vcpu, self.from_job, self.value):
                one.weight *= 0.1
                one.bias.zero_()
            # Keys and queries are multiplied with each other.
            self.from_vcpu.weight[1:] *= 10.0
            self.keep.bias.fill_(KEEP_BIAS)

    def forward(self, sets: Sets) -> tuple[Tensor, Tensor]:
        """
        Scores float32[B, n_slots], not yet masked, and values float32[B, 1].

        :param sets: the tokens
        """
        x = torch.cat([embed(one) for embed, one in zip(self.embed, sets.kinds, strict=True)])
        layers = (self.qkv, self.biases, self.mix, self.widen, self.narrow)
        for qkv, biases, mix, widen, narrow in zip(*layers, strict=True):
            x = x + mix(Attended.apply(qkv(Normalised.apply(x)), biases, sets))
            x = x + narrow(torch.relu(widen(Normalised.apply(x))))
        hosts, _, vcpus, jobs = Normalised.apply(x).split(sets.counts)
        logits = Pointed.apply(
            self.keep(hosts), self.from_vcpu(vcpus), self.from_job(jobs), self.there, sets
        )
        return logits, self.value(torch.relu(self.critic(hosts)))

    def arrays(self) -> Arrays:
        """Everything but the value, as plain arrays, for `agents.ppo.attention_network`."""
        return {
            name.replace(".", "_"): parameter.detach().numpy()
            for name, parameter in self.named_parameters()
            if not name.startswith(("critic", "value"))
        }
