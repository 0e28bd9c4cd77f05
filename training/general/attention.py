"""The attention network in torch: sets of tokens in, the scores of all lists out."""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from agents.array_archive import Arrays
from agents.ppo.attention_network import OF_LIST, OUTPUTS, RELATIONS
from env.control import HISTORY
from env.lists.menu import meaningful_lists
from env.sets.tokens import HOST, JOB, SERVICE, VCPU, Layout
from training.general.attention_kernels import (
    attend,
    attend_gradient,
    count_tokens,
    normalise,
    normalise_gradient,
    pack,
)

BACKGROUND_PLACE = 1
"""Which of a host's numbers says whether jobs may run in the background (`env.sets.tokens`)."""

REFUGE_PLACE = HOST + 17 + HISTORY
"""Which number of a row says what share of the vCPUs memcached's refuge is."""

SUMMED = torch.zeros(OUTPUTS, len(OF_LIST))
"""Which outputs are summed up for each list, 0 or 1."""
SUMMED[torch.from_numpy(OF_LIST), torch.arange(len(OF_LIST))[:, None]] = 1.0


def legal_lists(observations: np.ndarray) -> np.ndarray:
    """
    Which lists mean something, as the tokens tell, bool[B, n_lists].

    :param observations: float32[B, size]
    """
    sharing = observations[:, BACKGROUND_PLACE] > 0.5
    room = observations[:, REFUGE_PLACE] < 1.0
    return meaningful_lists(sharing[:, None], room[:, None])


class Sets:
    """
    The tokens of B decisions, packed.

    :param observations: float32[B, size]
    :param layout: of the rows
    """

    def __init__(self, observations: np.ndarray, layout: Layout):
        count = len(observations)
        self.legal = legal_lists(observations).astype(np.float32)
        self.starts = np.zeros((count + 1, 2), np.int64)
        vcpu_starts, job_starts = np.zeros((2, count + 1), np.int64)
        count_tokens(observations, layout.offsets, self.starts, vcpu_starts, job_starts)
        self.members = np.empty(self.starts[-1, 0], np.int64)
        self.relations = np.empty(self.starts[-1, 1], np.int8)
        n_vcpus, n_jobs = int(vcpu_starts[-1]), int(job_starts[-1])
        vcpus = np.empty((n_vcpus, VCPU), np.float32)
        jobs = np.empty((n_jobs, JOB), np.float32)
        where = np.empty(n_jobs, np.int64)
        pack(
            observations, layout.offsets, self.starts, vcpu_starts, job_starts,
            self.members, self.relations, vcpus, jobs, where,
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


class AttentionNetwork(nn.Module):
    """
    Host, memcached, vCPUs and jobs see each other; host and memcached then tell the lists' scores.

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
        self.ask = nn.Linear(2 * width, wide)
        self.answer = nn.Linear(wide, OUTPUTS)
        with torch.no_grad():
            for one in (*self.mix, *self.narrow):
                one.weight *= 0.5
            self.answer.weight *= 0.1
            self.answer.bias.zero_()

    def forward(self, sets: Sets) -> Tensor:
        """
        Scores float32[B, n_lists], not yet masked.

        :param sets: the tokens
        """
        x = torch.cat([embed(one) for embed, one in zip(self.embed, sets.kinds, strict=True)])
        layers = (self.qkv, self.biases, self.mix, self.widen, self.narrow)
        for qkv, biases, mix, widen, narrow in zip(*layers, strict=True):
            x = x + mix(Attended.apply(qkv(Normalised.apply(x)), biases, sets))
            x = x + narrow(torch.relu(widen(Normalised.apply(x))))
        hosts, services, *_ = Normalised.apply(x).split(sets.counts)
        asked = torch.relu(self.ask(torch.cat([hosts, services], dim=1)))
        scores: Tensor = self.answer(asked) @ SUMMED
        return scores

    def arrays(self) -> Arrays:
        """Weights and biases as plain arrays, for `agents.ppo.attention_network`."""
        return {
            name.replace(".", "_"): parameter.detach().numpy()
            for name, parameter in self.named_parameters()
        }
