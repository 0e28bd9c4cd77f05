"""
PPO whose advantages come from branches of the simulator in place of a critic.

From a state that the policy meets, K lists that it draws are tried on copies of the machine, by the
same load and the same random numbers, and the policy goes on from the next event (the vine of
Schulman et al. 2015). What a list is better by than the mean of the K is its advantage (Kool, van
Hoof, Welling 2019): no luck of the load is in it, and no error of a critic. The policy then learns
as in PPO, by the clipped surrogate (Schulman et al. 2017).
"""

from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.type_aliases import MaybeCallback
from torch import Tensor, nn

from env.lists.menu import LISTS
from training.general.attention import legal_lists
from training.general.attention_policy import AttentionPolicy
from training.general.branching import Branches, Explorer
from training.general.fitting import Fitting
from training.general.price_fitting import TEMPERATURE
from training.imitation.fit_network import minibatches
from training.ppo.loss_kernels import ILLEGAL_LOGIT
from training.ppo.training_run import LinearSchedule
from training.recipe import GeneralRecipe

MOST = 5.0
"""An advantage counts as so much at most, in units of `TEMPERATURE`."""

MAX_GRADIENT = 1.0
"""The gradient's norm at most."""


class BranchedPPO(BaseAlgorithm):
    """
    The algorithm; `num_timesteps` counts the lists that were tried.

    :param policy: its class; Stable-Baselines3 names it when it loads a model
    :param env: none, as the explorer has the machines
    :param explorer: plays the scenarios; a model that is loaded has none and cannot learn
    :param recipe: hyperparameters
    :param begun: lists that were tried before this run, if it goes on from another
    :param _init_setup_model: whether to make the policy; Stable-Baselines3 does when it loads one
    :param settings: Stable-Baselines3's own
    """

    policy: AttentionPolicy

    def __init__(
        self,
        policy: type[AttentionPolicy] = AttentionPolicy,
        env: None = None,
        explorer: Explorer | None = None,
        recipe: GeneralRecipe | None = None,
        begun: int = 0,
        _init_setup_model: bool = True,
        **settings: Any,
    ):
        schedule = LinearSchedule(recipe, begun) if recipe is not None else 0.0
        super().__init__(policy, env, schedule, **settings)
        self.explorer, self.recipe = explorer, recipe
        if _init_setup_model:
            assert explorer is not None and recipe is not None
            layout = explorer.layout
            self.policy_kwargs = {"layout": layout, "network": recipe.network.model_dump()}
            self.observation_space = spaces.Box(-np.inf, np.inf, (layout.size,), np.float32)
            self.action_space = spaces.Discrete(len(LISTS))
            self._setup_model()

    def _setup_model(self) -> None:
        self._setup_lr_schedule()
        self.set_random_seed(self.seed)
        self._rng = np.random.default_rng([self.seed or 0, 1])
        policy = self.policy_class(
            self.observation_space, self.action_space, self.lr_schedule, **self.policy_kwargs
        )
        assert isinstance(policy, AttentionPolicy)
        self.policy = policy

    def _excluded_save_params(self) -> list[str]:
        return [*super()._excluded_save_params(), "explorer", "recipe", "_rng"]

    def _get_torch_save_params(self) -> tuple[list[str], list[str]]:
        return ["policy", "policy.optimizer"], []

    def learn(
        self,
        total_timesteps: int,
        callback: MaybeCallback = None,
        log_interval: int = 1,
        tb_log_name: str = "",
        reset_num_timesteps: bool = True,
        progress_bar: bool = False,
    ) -> "BranchedPPO":
        """
        Improve the policy; Stable-Baselines3 gives the arguments their names.

        :param total_timesteps: lists to try; the last round is finished
        :param callback: called before and after the lists of each round are tried
        :param log_interval: rounds between two that are logged
        :param tb_log_name: not used, as the logger is given
        :param reset_num_timesteps: count from 0 and not from what was tried before
        :param progress_bar: not used, as it wants machines that Stable-Baselines3 steps
        """
        assert self.explorer is not None and self.recipe is not None
        if reset_num_timesteps:
            self.num_timesteps = 0
        end = self._total_timesteps = self.num_timesteps + total_timesteps
        called = self._init_callback(callback)
        called.on_training_start(locals(), globals())
        first, share = len(self.recipe.scenarios), self.recipe.scenarios_share
        rounds = 0
        while self.num_timesteps < end:
            called.on_rollout_start()
            playing = self.explorer.episodes(self.recipe.episodes, first, share)
            branches = self.explorer.met_branches(playing, self.policy, self.recipe.lists)
            self.num_timesteps += branches.lists.size
            if not called.on_step():
                break
            called.on_rollout_end()
            self._update_current_progress_remaining(self.num_timesteps, end)
            self.train(branches, self.recipe)
            rounds += 1
            if rounds % log_interval == 0:
                self.logger.dump(self.num_timesteps)
        called.on_training_end()
        return self

    def train(self, branches: Branches, recipe: GeneralRecipe) -> None:
        """
        Update the policy by what lists came to.

        :param branches: from states that it has met, of lists that it has drawn
        :param recipe: hyperparameters
        """
        self._update_learning_rate(self.policy.optimizer)
        lists = torch.from_numpy(branches.lists)
        advantages = torch.from_numpy(advantages_of(branches.prices))
        illegal = torch.from_numpy(~legal_lists(branches.tokens))
        tokens = torch.from_numpy(branches.tokens)
        fitting = Fitting(self.policy, tokens, torch.device("cpu"), padded=False)

        def log_probs(rows: Tensor, scores: Tensor) -> Tensor:
            return torch.log_softmax(scores.masked_fill(illegal[rows], ILLEGAL_LOGIT), dim=1)

        before, entropies = [], []
        with torch.no_grad():
            for rows in torch.arange(len(lists)).split(recipe.batch_size):
                drawn_from = log_probs(rows, fitting.scores(rows))
                before.append(drawn_from.gather(1, lists[rows]))
                entropies.append(-(drawn_from.exp() * drawn_from).sum(dim=1))
        before_update = torch.cat(before)

        def loss(rows: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
            drawn = log_probs(rows, scores).gather(1, lists[rows])
            ratio = torch.exp(drawn - before_update[rows])
            within = ratio.clamp(1.0 - recipe.clip_range, 1.0 + recipe.clip_range)
            gained = torch.minimum(ratio * advantages[rows], within * advantages[rows])
            return -gained.mean(dim=1), (ratio != within).float().mean(dim=1)

        self.policy.set_training_mode(True)
        clipped = []
        for rows in minibatches(len(lists), recipe.n_epochs, recipe.batch_size, self._rng):
            clipped.append(fitting.differentiate(rows, loss))
            nn.utils.clip_grad_norm_(fitting.trained, MAX_GRADIENT)
            self.policy.optimizer.step()
        self.policy.set_training_mode(False)
        self._n_updates += recipe.n_epochs
        self.logger.record("train/entropy", float(torch.cat(entropies).mean()))
        self.logger.record("train/clip_fraction", float(torch.stack(clipped).mean()))
        self.logger.record("train/spread", float(branches.prices.std(axis=1).mean()))


def advantages_of(prices: np.ndarray) -> np.ndarray:
    """
    By how much each list is better than the mean of those of its state, float32[n, K].

    :param prices: float32[n, K], see `training.general.branching.Branches`
    """
    better = prices.mean(axis=1, keepdims=True) - prices
    advantages: np.ndarray = np.clip(better / TEMPERATURE, -MOST, MOST)
    return advantages
