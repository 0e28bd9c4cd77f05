"""
The parts of the attention network that torch is slow at, compiled: many small sets of tokens.

Sets of different sizes lie packed in one array, so that nothing is spent on room that a small
scenario leaves empty, nor on jobs that are done. Linear layers are torch's, over all tokens at
once; what happens within a set is here, forwards and backwards. Inner loops run over what lies
together in memory and reduce nothing, so that they are vectorised as they stand. All kernels stay
in this file: numba's cache does not see edits of another one.
"""

import math
from typing import Any

import numba
import numpy as np

from agents.ppo.attention_network import HOLDS, ON, OTHER, SELF, SIBLING
from env.scenario import MAX_JOBS, MAX_VCPUS

_FAST: dict[str, Any] = {
    "error_model": "numpy", "cache": True, "nogil": True,
    "fastmath": {"contract", "nsz"},
}  # fmt: skip
_f32, _i32 = np.float32, np.int32
_MOST = -(-(2 + MAX_VCPUS + MAX_JOBS) // 8) * 8
"""Tokens of a set at most, the host's and memcached's among them; whole vectors of them."""


@numba.njit(inline="always")
def _exp(x):
    """Exponential of a float32 that is not positive, as in `training.ppo.loss_kernels`."""
    t = max(x * _f32(1.4426950408889634), _f32(-126.0))
    n = _i32(t + _f32(127.5)) - _i32(127)
    f = t - _f32(n)
    p = _f32(1.5403530393381608e-4)
    p = p * f + _f32(1.3333558146428443e-3)
    p = p * f + _f32(9.618129107628477e-3)
    p = p * f + _f32(5.550410866482158e-2)
    p = p * f + _f32(2.402265069591007e-1)
    p = p * f + _f32(6.931471805599453e-1)
    p = p * f + _f32(1.0)
    return p * _i32((n + 127) << 23).view(np.float32)


@numba.njit(**_FAST)
def count_tokens(observations, layout, starts, n_vcpus, n_jobs):
    """
    How many tokens each set has.

    :param observations: float32[B, size]
    :param layout: `env.sets.tokens.Layout.offsets`
    :param starts: int64[B + 1, 2], receives where each set's members and relations begin
    :param n_vcpus: int64[B + 1], receives how many vCPUs the sets before have
    :param n_jobs: int64[B + 1], the same for jobs
    """
    jobs, vcpus, _, vcpus_at, n_vcpu, _, jobs_at, n_job, _ = layout
    for b in range(observations.shape[0]):
        some_vcpus = some_jobs = 0
        for vcpu in range(vcpus):
            some_vcpus += observations[b, vcpus_at + vcpu * n_vcpu] > 0.5
        for job in range(jobs):
            own = jobs_at + job * n_job
            states = observations[b, own + 3] + observations[b, own + 4] + observations[b, own + 5]
            some_jobs += states > 0.5
        size = 2 + some_vcpus + some_jobs
        starts[b + 1, 0] = starts[b, 0] + size
        starts[b + 1, 1] = starts[b, 1] + size * size
        n_vcpus[b + 1] = n_vcpus[b] + some_vcpus
        n_jobs[b + 1] = n_jobs[b] + some_jobs


@numba.njit(**_FAST)
def pack(
    observations, layout, starts, vcpu_starts, job_starts, members, relations, vcpus, jobs, where
):
    """
    Pack the tokens of all sets, kind by kind: hosts, memcacheds, vCPUs, jobs.

    :param observations: float32[B, size]
    :param layout: `env.sets.tokens.Layout.offsets`
    :param starts: see `count_tokens`, as the next two
    :param vcpu_starts: int64[B + 1]
    :param job_starts: int64[B + 1]
    :param members: int64[T], receives the tokens of each set
    :param relations: int8[sum of sizes squared], receives what each token of a set is to each
    :param vcpus: float32[Tv, VCPU], receives the vCPUs' numbers
    :param jobs: float32[Tj, JOB], the jobs'
    :param where: int64[Tj], the place of each job in its row
    """
    n_jobs, n_vcpus, _, vcpus_at, n_vcpu, siblings_at, jobs_at, n_job, cores_at = layout
    count = observations.shape[0]
    first_job = 2 * count + vcpu_starts[count]
    for b in range(count):
        row = observations[b]
        at, size = starts[b, 0], starts[b + 1, 0] - starts[b, 0]
        members[at] = b
        members[at + 1] = count + b
        n_here = vcpu_starts[b + 1] - vcpu_starts[b]
        for vcpu in range(n_here):
            token = vcpu_starts[b] + vcpu
            members[at + 2 + vcpu] = 2 * count + token
            for feature in range(n_vcpu):
                vcpus[token, feature] = row[vcpus_at + vcpu * n_vcpu + feature]
        token = job_starts[b]
        for job in range(n_jobs):
            own = jobs_at + job * n_job
            if row[own + 3] + row[own + 4] + row[own + 5] > 0.5:
                members[at + 2 + n_here + token - job_starts[b]] = first_job + token
                where[token] = job
                for feature in range(n_job):
                    jobs[token, feature] = row[own + feature]
                token += 1
        to = relations[starts[b, 1] : starts[b + 1, 1]]
        for index in range(size * size):
            to[index] = OTHER
        for index in range(size):
            to[index * size + index] = SELF
        for vcpu in range(n_here):
            one = 2 + vcpu
            sibling = int(row[siblings_at + vcpu]) - 1
            if sibling >= 0:
                to[one * size + 2 + sibling] = SIBLING
            if row[vcpus_at + vcpu * n_vcpu + 5] > 0.5:
                to[size + one] = to[one * size + 1] = HOLDS
            for index in range(token - job_starts[b]):
                own = cores_at + where[job_starts[b] + index] * (n_vcpus + 1)
                if row[own + vcpu] > 0.5:
                    other = 2 + n_here + index
                    to[one * size + other] = to[other * size + one] = ON


@numba.njit(**_FAST)
def normalise(x, y, scales):
    """
    Divide each token by its root mean square.

    :param x: float32[T, d]
    :param y: float32[T, d], receives the quotients
    :param scales: float32[T], receives what was multiplied with
    """
    width = x.shape[1]
    parts = np.zeros(8, np.float32)
    for t in range(x.shape[0]):
        parts[:] = 0.0
        for start in range(0, width, 8):
            for lane in range(8):
                parts[lane] += x[t, start + lane] * x[t, start + lane]
        total = _f32(1e-6)
        for lane in range(8):
            total += parts[lane] / _f32(width)
        scale = _f32(1.0) / math.sqrt(total)
        scales[t] = scale
        for unit in range(width):
            y[t, unit] = x[t, unit] * scale


@numba.njit(**_FAST)
def normalise_gradient(y, scales, by_y, by_x):
    """
    The gradient of `normalise`.

    :param y: float32[T, d], as it wrote it
    :param scales: float32[T], as it wrote them
    :param by_y: float32[T, d]
    :param by_x: float32[T, d], receives the slopes
    """
    width = y.shape[1]
    parts = np.zeros(8, np.float32)
    for t in range(y.shape[0]):
        parts[:] = 0.0
        for start in range(0, width, 8):
            for lane in range(8):
                parts[lane] += by_y[t, start + lane] * y[t, start + lane]
        mean = _f32(0.0)
        for lane in range(8):
            mean += parts[lane] / _f32(width)
        for unit in range(width):
            by_x[t, unit] = scales[t] * (by_y[t, unit] - mean * y[t, unit])


@numba.njit(**_FAST)
def attend(qkv, biases, starts, members, relations, out, shares):
    """
    Attention of each token to those of its set.

    :param qkv: float32[T, 3 d], queries, keys, values; a head is d / heads of each
    :param biases: float32[heads, RELATIONS], added to the scores
    :param starts: see `count_tokens`
    :param members: see `pack`
    :param relations: see `pack`
    :param out: float32[T, d], receives the mixtures of values
    :param shares: float32[heads, sum of sizes squared], receives the mixtures
    """
    heads, width = biases.shape[0], out.shape[1]
    part = width // heads
    scale = _f32(1.0 / math.sqrt(part))
    # One head of one set at a time, in memory of its own, where indices are plain loop variables.
    queries, values = np.zeros((2, _MOST, part), np.float32)
    keys = np.zeros((part, _MOST), np.float32)
    scores, mixed = np.zeros(_MOST, np.float32), np.zeros(part, np.float32)
    for b in range(starts.shape[0] - 1):
        at, size = starts[b, 0], starts[b + 1, 0] - starts[b, 0]
        wide = (size + 7) // 8 * 8
        for head in range(heads):
            first = head * part
            for k in range(size):
                token = members[at + k]
                for e in range(part):
                    queries[k, e] = qkv[token, first + e] * scale
                    keys[e, k] = qkv[token, width + first + e]
                    values[k, e] = qkv[token, 2 * width + first + e]
            for i in range(size):
                token, row = members[at + i], starts[b, 1] + i * size
                for k in range(wide):
                    scores[k] = 0.0
                for e in range(part):
                    query = queries[i, e]
                    for k in range(wide):
                        scores[k] += query * keys[e, k]
                top = _f32(-1e30)
                for k in range(size):
                    scores[k] += biases[head, relations[row + k]]
                    top = max(top, scores[k])
                for k in range(size, wide):
                    scores[k] = top
                for k in range(wide):
                    scores[k] = _exp(scores[k] - top)
                total = _f32(0.0)
                for k in range(size):
                    total += scores[k]
                total = _f32(1.0) / total
                for e in range(part):
                    mixed[e] = 0.0
                for k in range(size):
                    share = scores[k] * total
                    shares[head, row + k] = share
                    for e in range(part):
                        mixed[e] += share * values[k, e]
                for e in range(part):
                    out[token, first + e] = mixed[e]


@numba.njit(**_FAST)
def attend_gradient(qkv, biases, starts, members, relations, shares, by_out, by_qkv, by_biases):
    """
    The gradient of `attend`.

    :param qkv: as given to it, as the next four
    :param biases: float32[heads, RELATIONS]
    :param starts: see `count_tokens`
    :param members: see `pack`
    :param relations: see `pack`
    :param shares: as it wrote them
    :param by_out: float32[T, d]
    :param by_qkv: float32[T, 3 d], zeros; receives the slopes
    :param by_biases: float32[heads, RELATIONS], they are added to it
    """
    heads, width = biases.shape[0], by_out.shape[1]
    part = width // heads
    scale = _f32(1.0 / math.sqrt(part))
    queries, keys, outs, by_keys, by_values = np.zeros((5, _MOST, part), np.float32)
    values = np.zeros((part, _MOST), np.float32)
    slopes, by_query = np.zeros(_MOST, np.float32), np.zeros(part, np.float32)
    for b in range(starts.shape[0] - 1):
        at, size = starts[b, 0], starts[b + 1, 0] - starts[b, 0]
        wide = (size + 7) // 8 * 8
        for head in range(heads):
            first = head * part
            for k in range(size):
                token = members[at + k]
                for e in range(part):
                    queries[k, e] = qkv[token, first + e] * scale
                    keys[k, e] = qkv[token, width + first + e] * scale
                    values[e, k] = qkv[token, 2 * width + first + e]
                    outs[k, e] = by_out[token, first + e]
                    by_keys[k, e] = by_values[k, e] = 0.0
            for i in range(size):
                token, row = members[at + i], starts[b, 1] + i * size
                for k in range(wide):
                    slopes[k] = 0.0
                for e in range(part):
                    by = outs[i, e]
                    for k in range(wide):
                        slopes[k] += by * values[e, k]
                mean = _f32(0.0)
                for k in range(size):
                    mean += slopes[k] * shares[head, row + k]
                for e in range(part):
                    by_query[e] = 0.0
                for k in range(size):
                    share = shares[head, row + k]
                    slope = share * (slopes[k] - mean)
                    by_biases[head, relations[row + k]] += slope
                    for e in range(part):
                        by_query[e] += slope * keys[k, e]
                        by_keys[k, e] += slope * queries[i, e]
                        by_values[k, e] += share * outs[i, e]
                for e in range(part):
                    by_qkv[token, first + e] = by_query[e]
            for k in range(size):
                token = members[at + k]
                for e in range(part):
                    by_qkv[token, width + first + e] = by_keys[k, e]
                    by_qkv[token, 2 * width + first + e] = by_values[k, e]
