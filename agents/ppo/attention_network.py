"""The attention network in NumPy: one decision at a time, of any scenario it is told of."""

import itertools
import math
from typing import Any

import numpy as np
import numpy.typing as npt

from agents.array_archive import Arrays
from env.lists.menu import MENU, PARTS
from env.sets.tokens import HOST, JOB, SERVICE, VCPU, TokenTable

OTHER, SELF, SIBLING, ON, HOLDS = range(5)
"""What one token is to another: nothing, itself, an SMT sibling, a job and a vCPU of it, memcached
and a vCPU of it."""
RELATIONS = 5

PAIRS = tuple(itertools.combinations(range(len(PARTS)), 2))
_SIZES = [PARTS[i] * PARTS[j] for i, j in PAIRS]
OUTPUTS = sum(_SIZES)
"""What a list is worth is a sum over the pairs of its four answers; of each pair of answers there
is an output."""

OF_LIST = np.stack(
    [
        first + MENU[:, i] * PARTS[j] + MENU[:, j]
        for first, (i, j) in zip(np.cumsum([0, *_SIZES]), PAIRS, strict=False)
    ],
    axis=1,
)
"""int64[n_lists, len(PAIRS)], the outputs that are summed up for each list."""

SMALLEST = np.float32(1e-6)
"""What is added to a token's mean square before it is divided by its root."""


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
    asked, _ = arrays["ask_weight"].shape
    layers = sum(name.startswith("biases_") for name in arrays)
    if heads < 1 or width % heads or width > 1024 or max(wide, asked) > 4096 or layers > 16:
        raise ValueError("no widths of an attention network")
    maps = {f"embed_{i}": (width, numbers) for i, numbers in enumerate((HOST, SERVICE, VCPU, JOB))}
    named: dict[str, tuple[int, ...]] = {}
    for layer in range(layers):
        named[f"biases_{layer}"] = (heads, RELATIONS)
        maps |= {
            f"qkv_{layer}": (3 * width, width),
            f"mix_{layer}": (width, width),
            f"widen_{layer}": (wide, width),
            f"narrow_{layer}": (width, wide),
        }
    maps |= {"ask": (asked, 2 * width), "answer": (OUTPUTS, asked)}
    for name, (outputs, inputs) in maps.items():
        named |= {f"{name}_weight": (outputs, inputs), f"{name}_bias": (outputs,)}
    return named


class SingleAttention:
    """
    The deterministic policy: the best list.

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
        self._relations = np.zeros((2 + len(self._vcpus),) * 2, np.int64)
        np.fill_diagonal(self._relations, SELF)
        for vcpu, sibling in enumerate(self.row[siblings_at:jobs_at].astype(int)):
            if sibling:
                self._relations[2 + vcpu, 1 + sibling] = SIBLING

    def scores(self) -> npt.NDArray[np.float32]:
        """The scores of all lists for the tokens as they are, float32[n_lists]."""
        shown = np.flatnonzero(self._jobs[:, 3:6].any(axis=1))
        relations = self._related(shown)
        kinds = (self._host[None], self._service[None], self._vcpus, self._jobs[shown])
        x = np.concatenate([self._map(f"embed_{i}", kind) for i, kind in enumerate(kinds)])
        for layer in range(self._layers):
            x += self._map(f"mix_{layer}", self._attend(layer, _normalised(x), relations))
            wide = self._map(f"widen_{layer}", _normalised(x))
            x += self._map(f"narrow_{layer}", np.maximum(wide, 0.0, out=wide))
        asked = self._map("ask", _normalised(x[:2]).reshape(1, -1))
        answers = self._map("answer", np.maximum(asked, 0.0, out=asked))
        scores: npt.NDArray[np.float32] = answers[0, OF_LIST].sum(axis=1)
        return scores

    def choose(self, legal: npt.NDArray[np.bool_]) -> int:
        """
        The best list.

        :param legal: bool[n_lists], which may be chosen
        :raises ValueError: if the network's output is not a number
        """
        scores = np.where(legal, self.scores(), -np.inf)
        best = int(scores.argmax())
        if not math.isfinite(scores[best]):
            raise ValueError(f"the network's output is {scores[best]}")
        return best

    def _map(self, name: str, x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """A linear map."""
        weight, bias = self._transposed[name]
        y: npt.NDArray[np.float32] = x @ weight
        y += bias
        return y

    def _related(self, shown: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """What each token is to each, int64[N, N]."""
        first = 2 + len(self._vcpus)
        size = first + len(shown)
        relations = np.zeros((size, size), np.int64)
        relations[:first, :first] = self._relations
        relations[1, 2:first] = relations[2:first, 1] = HOLDS * self._vcpus[:, 5]
        relations[first:, 2:first] = ON * self._cores[shown]
        relations[2:first, first:] = relations[first:, 2:first].T
        index = np.arange(first, size)
        relations[index, index] = SELF
        return relations

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


def _normalised(x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Each token over its root mean square."""
    squares = np.einsum("ij,ij->i", x, x)
    squares *= np.float32(1.0 / x.shape[1])
    squares += SMALLEST
    return x / np.sqrt(squares, out=squares)[:, None]
