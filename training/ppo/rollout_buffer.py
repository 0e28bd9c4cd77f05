"""A rollout buffer that Stable-Baselines3's PPO spends little time on."""

from collections.abc import Generator

import numpy as np
import torch
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.type_aliases import RolloutBufferSamples


class LeanRolloutBuffer(RolloutBuffer):
    """
    Stable-Baselines3's buffer with fewer copies.

    Its arrays are kept from rollout to rollout, are not rearranged before an update, and are copied
    once on the way into a minibatch.
    """

    def reset(self) -> None:
        """Forget the decisions."""
        if not hasattr(self, "observations"):
            super().reset()
        self.pos, self.full = 0, False

    def get(self, batch_size: int | None = None) -> Generator[RolloutBufferSamples, None, None]:
        """
        All decisions in random order.

        :param batch_size: of each minibatch; all decisions in one if none is given
        """
        assert self.full
        fields = (
            self.observations, self.actions, self.values, self.log_probs, self.advantages,
            self.returns,
        )  # fmt: skip
        flat = [torch.from_numpy(field).flatten(0, 1) for field in fields]
        order = torch.from_numpy(np.random.permutation(len(flat[0])))
        for rows in order.split(batch_size or len(order)):
            yield RolloutBufferSamples(*(field.index_select(0, rows) for field in flat))
