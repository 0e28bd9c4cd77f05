"""
The equations of one decision, compiled: softmax over legal actions, drawing, PPO's loss, gradients.

torch needs a dozen passes over logits and masks for them; here each is one loop over decisions.
A row is worked on in a scratch array as wide as a whole number of vector registers, so that the
compiler needs no scalar remainder, and with an exponential that it can vectorise.

The mask of a decision is the end of its observation: 1 for legal actions, of which there is one
at least. All kernels stay in this file: numba's cache does not see edits of another one.
"""

import math

import numba
import numpy as np

from env.physics.compiled import allocating, compiled

ILLEGAL_LOGIT = -1e8

STATISTICS = ("policy_gradient_loss", "value_loss", "entropy_loss", "clip_fraction", "approx_kl")
"""What a minibatch reports, under Stable-Baselines3's names."""

_LANES = 32
_NEVER = np.float32(-1e7)
_ILLEGAL = np.float32(ILLEGAL_LOGIT)
_LOWEST = np.int32(-(2**31))
_f32, _i32 = np.float32, np.int32


@numba.njit(error_model="numpy", inline="always")
def _exp(x):  # type: ignore[no-untyped-def]
    """
    Exponential of a float32 that is not positive, to 4e-7 relative.

    2^n 2^f with |f| <= 1/2: the first factor is written into the exponent's bits, the second is
    the Taylor polynomial of degree 6.
    """
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


@numba.njit(error_model="numpy", inline="always")
def _as_ordered(bits):  # type: ignore[no-untyped-def]
    """A float32's bits to integers of the same order, and back: negative ones are turned round."""
    return _i32(bits ^ _i32(_i32(bits >> 31) & _i32(0x7FFFFFFF)))


@allocating
def _scratch(n_actions):  # type: ignore[no-untyped-def]
    """Rows to work in, float32[4, n_actions or a little more]."""
    return np.full((4, (n_actions + _LANES - 1) // _LANES * _LANES), _ILLEGAL)


@compiled
def add_up(numbers):  # type: ignore[no-untyped-def]
    """
    The sum of numbers, which are lost.

    In an order of its own: a compiler that may choose the order chooses differently from one run to
    the next, and training would not end in the same policy twice.

    :param numbers: float32[n], n a multiple of `_LANES`
    """
    for start in range(_LANES, len(numbers), _LANES):
        for lane in range(_LANES):
            numbers[lane] += numbers[start + lane]
    half = _LANES // 2
    while half > 0:
        for lane in range(half):
            numbers[lane] += numbers[half + lane]
        half //= 2
    return numbers[0]


@compiled
def softmax(logits, observations, row, work):  # type: ignore[no-untyped-def]
    """
    Probabilities of one decision's actions, into `work[1]`; illegal ones have 0.

    :param logits: float32[B, A]
    :param observations: float32[B, n_features + A]
    :param row: index of the decision
    :param work: from `_scratch`
    :return: logit - log-probability of any legal action, and the entropy
    """
    n_actions, width = logits.shape[1], work.shape[1]
    mask = observations[row, observations.shape[1] - n_actions :]
    for action in range(n_actions):
        legal = mask[action] > _f32(0.5)
        work[0, action] = logits[row, action] if legal else _ILLEGAL
    highest = _LOWEST  # a maximum of integers is vectorised, one of floats is not
    for lane in range(width):
        highest = max(highest, _as_ordered(_f32(work[0, lane]).view(np.int32)))
    top = _as_ordered(highest).view(np.float32)
    for lane in range(width):
        below = work[0, lane] - top
        weight = _exp(below) if below > _NEVER else _f32(0.0)
        work[1, lane] = work[2, lane] = weight
        work[3, lane] = weight * below
    total, moment = add_up(work[2]), add_up(work[3])
    share = _f32(1.0) / total
    for lane in range(width):
        work[1, lane] *= share
    log_total = _f32(math.log(total))
    return top + log_total, log_total - moment * share


@allocating
def draw_actions(logits, observations, luck, actions, log_probs):  # type: ignore[no-untyped-def]
    """
    Draw an action for each decision by inverting the cumulated probabilities.

    :param logits: float32[B, A]
    :param observations: float32[B, n_features + A]
    :param luck: float32[B] in [0, 1)
    :param actions: int64[B], receives the actions
    :param log_probs: float32[B], receives their log-probabilities
    """
    work = _scratch(logits.shape[1])
    for row in range(logits.shape[0]):
        offset, _ = softmax(logits, observations, row, work)
        left = luck[row] - work[1, 0]
        chosen = 0
        while left >= 0.0 and chosen < logits.shape[1] - 1:
            chosen += 1
            left -= work[1, chosen]
        while work[1, chosen] == 0.0:  # rounding has left some luck at the end
            chosen -= 1
        actions[row] = chosen
        log_probs[row] = logits[row, chosen] - offset


@allocating
def masked_log_probs(  # type: ignore[no-untyped-def]
    logits, observations, actions, probabilities, offsets, log_probs, entropies
):
    """
    Log-probabilities of given actions, and entropies.

    :param logits: float32[B, A]
    :param observations: float32[B, n_features + A]
    :param actions: int64[B], index of each action taken
    :param probabilities: float32[B, A], receives those of all actions
    :param offsets: float32[B], receives logit - log-probability
    :param log_probs: float32[B], receives those of the actions
    :param entropies: float32[B], receives the entropies
    """
    work = _scratch(logits.shape[1])
    for row in range(logits.shape[0]):
        offsets[row], entropies[row] = softmax(logits, observations, row, work)
        log_probs[row] = logits[row, actions[row]] - offsets[row]
        for action in range(logits.shape[1]):
            probabilities[row, action] = work[1, action]


@compiled
def slope(  # type: ignore[no-untyped-def]
    logits, row, probabilities, offset, entropy, action, by_log_prob, by_entropy, slopes
):
    """
    The gradient by one decision's logits, which illegal actions are no part of.

    d log p_a / d logit_j = [j = a] - p_j;  d entropy / d logit_j = -p_j (log p_j + entropy)

    :param logits: float32[B, A]
    :param row: index of the decision
    :param probabilities: float32[A or more]
    :param offset: logit - log-probability
    :param entropy: of the decision
    :param action: a, the action taken
    :param by_log_prob: slope of the loss by its log-probability
    :param by_entropy: slope of the loss by the entropy
    :param slopes: float32[B, A], receives the gradient; may be `logits`
    """
    rest = by_log_prob + by_entropy * (entropy - offset)
    for j in range(logits.shape[1]):
        slopes[row, j] = -probabilities[j] * (by_entropy * logits[row, j] + rest)
    slopes[row, action] += by_log_prob


@compiled
def masked_log_probs_gradient(  # type: ignore[no-untyped-def]
    logits, probabilities, offsets, entropies, actions, by_log_prob, by_entropy, slopes
):
    """
    The gradient of log-probabilities and entropies by the logits.

    :param logits: float32[B, A], as given to `masked_log_probs`
    :param probabilities: float32[B, A], as written by it, like the next two
    :param offsets: float32[B]
    :param entropies: float32[B]
    :param actions: int64[B], as given to `masked_log_probs`
    :param by_log_prob: float32[B], slopes by `log_probs`
    :param by_entropy: float32[B], slopes by `entropies`
    :param slopes: float32[B, A], receives the gradient
    """
    for row in range(logits.shape[0]):
        slope(
            logits, row, probabilities[row], offsets[row], entropies[row], actions[row],
            by_log_prob[row], by_entropy[row], slopes,
        )  # fmt: skip


@compiled
def relu_gradient(slopes, activations):  # type: ignore[no-untyped-def]
    """
    Carry slopes back through ReLUs: nothing passes where one is off.

    :param slopes: float32[B, n], by the outputs; become those by the inputs
    :param activations: float32[B, n], the outputs
    """
    for row in range(slopes.shape[0]):
        for unit in range(slopes.shape[1]):
            open_ = _f32(1.0) if activations[row, unit] > _f32(0.0) else _f32(0.0)
            slopes[row, unit] *= open_


@allocating
def loss_gradient(  # type: ignore[no-untyped-def]
    logits, values, observations, decisions, coefficients, sums
):
    """
    Replace logits and values by the gradient of PPO's loss by them.

    :param logits: float32[B, A], of a part of the minibatch
    :param values: float32[B, 1]
    :param observations: float32[B, n_features + A]
    :param decisions: float32[B, 4] of action, its log-probability when it was taken, its
        advantage before normalisation, and its return
    :param coefficients: float32[6]: mean and scale of the minibatch's advantages, clip range,
        entropy and value coefficients, one over the minibatch's size
    :param sums: float64[5], `STATISTICS` are added to it
    """
    mean, scale, clip_range, ent_coef, vf_coef, share = coefficients
    # In one precision throughout, or gains could seem clipped that are not.
    lowest, highest = _f32(1.0) - clip_range, _f32(1.0) + clip_range
    work = _scratch(logits.shape[1])
    for b in range(logits.shape[0]):
        action = int(decisions[b, 0])
        offset, entropy = softmax(logits, observations, b, work)
        log_ratio = logits[b, action] - offset - decisions[b, 1]
        ratio = _f32(math.exp(log_ratio))
        advantage = (decisions[b, 2] - mean) * scale
        gain = advantage * ratio
        clipped_gain = advantage * min(max(ratio, lowest), highest)
        error = values[b, 0] - decisions[b, 3]
        sums[0] -= min(gain, clipped_gain) * share
        sums[1] += error * error * share
        sums[2] -= entropy * share
        sums[3] += (abs(ratio - _f32(1.0)) > clip_range) * share
        sums[4] += (ratio - 1.0 - log_ratio) * share

        # By the log-probability of the action taken: nothing where clipping holds the gain.
        by_log_prob = -gain * share if gain <= clipped_gain else _f32(0.0)
        slope(logits, b, work[1], offset, entropy, action, by_log_prob, -ent_coef * share, logits)
        values[b, 0] = _f32(2.0) * vf_coef * share * error
