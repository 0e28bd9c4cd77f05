"""The attention network in NumPy: one decision at a time, of any scenario it is told of."""

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from agents.array_archive import Arrays
from env.sets.pointers import CORE, MOST_THREADS
from env.sets.tokens import HOST, JOB, SERVICE, VCPU, TokenTable

OTHER, SELF, SIBLING, ON, HOLDS = range(5)
"""What one token is to another: nothing, itself, an SMT sibling, a job and a vCPU of it, memcached
and a vCPU of it."""
RELATIONS = 5

KEY = 16
"""Width of the vCPUs' keys and the jobs' queries."""

START, PLACES, ON_CORE, PAUSE, QUERIES = slice(0, 3), slice(3, 5), slice(5, 8), 8, slice(9, None)
"""What a job's outputs are: starting by 1, l and l squared (l is log2 of threads); its place
everywhere, background and normal; on a core, background and normal, or on one vCPU; its pause;
three queries of such places."""
FROM_JOB, FROM_VCPU = 9 + 3 * KEY, 1 + KEY
"""Outputs of a job; of a vCPU, for the set of memcached that it names, and its key."""

SMALLEST = np.float32(1e-6)
"""What is added to a token's mean square before it is divided by its root."""

SMALLEST_SCORE = np.float32(-1e9)
"""Stands for the best of no legal edits."""

BASIS = np.array(
    [(1.0, math.log2(n), math.log2(n) ** 2) for n in range(1, MOST_THREADS + 1)], np.float32
).T
"""float32[3, MOST_THREADS], what a job's first outputs are multiplied with."""


def shapes(arrays: Arrays) -> dict[str, tuple[int, ...]]:
    """
    The arrays that a network of these widths has, and their shapes.

    :param arrays: those of a network; its widths are read from some of them
    :raises KeyError: if those are not there
    :raises ValueError: if they say no widths
    """
    width, _ = arrays["embed_0_weight"].shape
    heads, _ = arrays["biases_0"].shape
    wide, _ = arrays["widen_0_weight"].shape
    layers = sum(name.startswith("biases_") for name in arrays)
    if width % heads or width > 1024 or wide > 4096 or layers > 16:
        raise ValueError("no widths of an attention network")
    maps = {f"embed_{i}": (width, numbers) for i, numbers in enumerate((HOST, SERVICE, VCPU, JOB))}
    named: dict[str, tuple[int, ...]] = {"there": (3,)}
    for layer in range(layers):
        named[f"biases_{layer}"] = (heads, RELATIONS)
        maps |= {
            f"qkv_{layer}": (3 * width, width),
            f"mix_{layer}": (width, width),
            f"widen_{layer}": (wide, width),
            f"narrow_{layer}": (width, wide),
        }
    maps |= {"keep": (1, width), "from_vcpu": (FROM_VCPU, width), "from_job": (FROM_JOB, width)}
    for name, (outputs, inputs) in maps.items():
        named |= {f"{name}_weight": (outputs, inputs), f"{name}_bias": (outputs,)}
    return named


def decided(scores: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
    """
    What is done, int64[B]: first whether anything is, then what.

    Edits that are as good as each other, such as starts of like jobs, share their probability. So
    an edit is made where all of them together are likelier than to keep, and then the likeliest.

    :param scores: float32[B, n], the first one that of `keep`; -inf where an edit is not legal
    """
    edits = scores[:, 1:]
    best: npt.NDArray[np.int64] = edits.argmax(axis=1)
    top = np.maximum(edits.max(axis=1), SMALLEST_SCORE)
    together = top + np.log(np.exp(edits - top[:, None]).sum(axis=1) + SMALLEST)
    return np.where(scores[:, 0] >= together, 0, best + 1)


class SingleAttention:
    """
    The deterministic policy (`decided`).

    The caller writes the tokens into `tokens`, float32[size].

    :param arrays: weights and biases (`shapes`)
    :param table: of the scenario
    """

    def __init__(self, arrays: Arrays, table: TokenTable):
        self._arrays = arrays
        self._layers = sum(name.startswith("biases_") for name in arrays)
        self._heads, _ = arrays["biases_0"].shape
        self._transposed = {
            name.removesuffix("_weight"): (
                np.ascontiguousarray(array.T),
                arrays[name.replace("_weight", "_bias")],
            )
            for name, array in arrays.items()
            if name.endswith("_weight")
        }
        self.row = table.blank.copy()
        self.tokens = self.row.data
        n_jobs, n_vcpus, at, vcpus_at, _, siblings_at, jobs_at, _, cores_at = table.layout.offsets
        self._host, self._service = self.row[:at], self.row[at:vcpus_at]
        self._vcpus = self.row[vcpus_at:siblings_at].reshape(n_vcpus, VCPU)
        self._vcpus = self._vcpus[: int(self._vcpus[:, 0].sum())]
        self._jobs = self.row[jobs_at:cores_at].reshape(n_jobs, JOB)
        self._cores = self.row[cores_at:].reshape(n_jobs, n_vcpus + 1)[:, : len(self._vcpus)]
        self._slot_of = table.slot_of
        self._slots = np.zeros(len(table.layout.slots), np.float32)
        slots = table.layout.slots
        self._of_jobs = self._slots[slots.first_job :].reshape(n_jobs, slots.per_job)
        self._room = n_vcpus
        self._relations = np.zeros((2 + len(self._vcpus),) * 2, np.int64)
        np.fill_diagonal(self._relations, SELF)
        for vcpu, sibling in enumerate(self.row[siblings_at:jobs_at].astype(int)):
            if sibling:
                self._relations[2 + vcpu, 1 + sibling] = SIBLING

    def scores(self) -> npt.NDArray[np.float32]:
        """The scores of all edits for the tokens as they are, float32[n_edits], not masked."""
        shown = np.flatnonzero(self._jobs[:, 3:6].any(axis=1))
        relations, cores = self._related(shown)
        kinds = (self._host[None], self._service[None], self._vcpus, self._jobs[shown])
        x = np.concatenate([self._map(f"embed_{i}", kind) for i, kind in enumerate(kinds)])
        for layer in range(self._layers):
            x += self._map(f"mix_{layer}", self._attend(layer, _normalised(x), relations))
            wide = self._map(f"widen_{layer}", _normalised(x))
            x += self._map(f"narrow_{layer}", np.maximum(wide, 0.0, out=wide))
        x = _normalised(x)
        return self._point(x, shown, cores)

    def choose(self, penalty: npt.NDArray[np.float32]) -> int:
        """
        The legal edit to make (`decided`).

        :param penalty: float32[n_edits], 0 where an edit is legal and -inf where it is not
        :raises ValueError: if the network's output is not a number
        """
        scores = self.scores() + penalty
        best = int(decided(scores[None])[0])
        if not math.isfinite(scores[best]):
            raise ValueError(f"the network's output is {scores[best]}")
        return best

    def _map(self, name: str, x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """A linear map."""
        weight, bias = self._transposed[name]
        y: npt.NDArray[np.float32] = x @ weight
        y += bias
        return y

    def _related(
        self, shown: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """What each token is to each, int64[N, N], and the vCPUs of the jobs that are shown."""
        first = 2 + len(self._vcpus)
        size = first + len(shown)
        relations = np.zeros((size, size), np.int64)
        relations[:first, :first] = self._relations
        relations[1, 2:first] = relations[2:first, 1] = HOLDS * self._vcpus[:, 5]
        cores = self._cores[shown]
        relations[first:, 2:first] = ON * cores
        relations[2:first, first:] = relations[first:, 2:first].T
        index = np.arange(first, size)
        relations[index, index] = SELF
        return relations, cores

    def _attend(
        self, layer: int, x: npt.NDArray[np.float32], relations: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.float32]:
        """Each token's mixture of values, float32[N, d]."""
        size, width = x.shape
        qkv = self._map(f"qkv_{layer}", x).reshape(size, 3, self._heads, -1)
        queries, keys, values = qkv.transpose(1, 2, 0, 3)
        scores: Any = queries @ keys.transpose(0, 2, 1)
        scores *= np.float32(1.0 / math.sqrt(width // self._heads))
        scores += self._arrays[f"biases_{layer}"][:, relations]
        scores -= scores.max(axis=2, keepdims=True)
        np.exp(scores, out=scores)
        scores /= scores.sum(axis=2, keepdims=True)
        mixed: npt.NDArray[np.float32] = scores @ values
        return mixed.transpose(1, 0, 2).reshape(size, width)

    def _point(
        self,
        x: npt.NDArray[np.float32],
        shown: npt.NDArray[np.int64],
        cores: npt.NDArray[np.float32],
    ) -> npt.NDArray[np.float32]:
        """The scores of the edits from the last layer's tokens."""
        n_vcpus, room = len(self._vcpus), self._room
        slots = self._slots
        slots[0] = self._map("keep", x[0])[0]
        vcpus = self._map("from_vcpu", x[2 : 2 + n_vcpus])
        slots[1 : 1 + n_vcpus] = vcpus[:, 0]
        jobs = self._map("from_job", x[2 + n_vcpus :])
        own = np.zeros((len(shown), self._of_jobs.shape[1]), np.float32)
        own[:, :MOST_THREADS] = jobs[:, START] @ BASIS
        own[:, MOST_THREADS:CORE] = jobs[:, PLACES]
        pointed = jobs[:, QUERIES].reshape(-1, KEY) @ vcpus[:, 1:].T
        pointed = pointed.reshape(len(shown), 3, n_vcpus)
        pointed += jobs[:, ON_CORE, None] + self._arrays["there"][:, None] * cores[:, None, :]
        own[:, CORE : CORE + 2 * n_vcpus : 2] = pointed[:, 0]
        own[:, CORE + 1 : CORE + 1 + 2 * n_vcpus : 2] = pointed[:, 1]
        own[:, CORE + 2 * room : CORE + 2 * room + n_vcpus] = pointed[:, 2]
        own[:, -1] = jobs[:, PAUSE]
        self._of_jobs[shown] = own
        return slots[self._slot_of]


def _normalised(x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Each token over its root mean square."""
    squares = np.einsum("ij,ij->i", x, x)
    squares *= np.float32(1.0 / x.shape[1])
    squares += SMALLEST
    return x / np.sqrt(squares, out=squares)[:, None]
