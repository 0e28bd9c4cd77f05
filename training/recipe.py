"""Recipes: the hyperparameters of a training run, read from `training/hyperparameters/*.yaml`."""

from pathlib import Path
from typing import Annotated

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)

from env.errors import InputError, validation_message
from env.inputs.yaml_files import read_yaml

Fraction = Annotated[float, Field(gt=0.0, le=1.0)]
LoadInterval = Annotated[float, Field(ge=0.01, le=1e6)]  # as a scenario's

RECIPE_FOLDER = Path(__file__).parent / "hyperparameters"


class Imitation(BaseModel):
    """
    How the network imitates an expert before it learns from reward (`training.imitation`).

    :param search_traces: number of training traces that the expert's schedule is searched on
    :param search_evaluations: schedules that the search tries
    :param release: share of the schedule's load threshold below which the expert takes vCPUs from
        memcached again
    :param unprobed: factor on that threshold where no probe shows whether the SLO holds. 0.65:
        room for one vCPU, and for what a second one adds, that both serve 20 % less than the
        profile says
    :param n_envs: simulated machines in parallel; on half of them the network plays
    :param n_steps: decisions of each machine in one round, somewhat more than an episode
    :param random_edits: how often a random edit is taken instead of the expert's, on the other half
    :param epochs: passes over all demonstrations so far, in each round; from the second round on
        the network plays
    :param batch_size: decisions in one minibatch
    :param learning_rate: Adam's step size at the start of a round; falls linearly to 0
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    search_traces: PositiveInt
    search_evaluations: Annotated[int, Field(ge=3)]
    release: Fraction
    unprobed: Fraction
    n_envs: Annotated[int, Field(ge=2)]
    n_steps: PositiveInt
    random_edits: Annotated[float, Field(ge=0.0, le=1.0)]
    epochs: Annotated[tuple[PositiveInt, ...], Field(min_length=1)]
    batch_size: PositiveInt
    learning_rate: PositiveFloat


class Prices(BaseModel):
    """
    How a network for any scenario begins: it learns what random lists come to.

    :param episodes: that are begun, each in a scenario
    :param lists: random ones that are tried at the start of each
    :param epochs: passes over all of them
    :param batch_size: states in one minibatch
    :param learning_rate: Adam's step size at the start; falls linearly to a fiftieth
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    episodes: PositiveInt
    lists: Annotated[int, Field(ge=2, le=100)]
    epochs: PositiveInt
    batch_size: PositiveInt
    learning_rate: PositiveFloat


class Network(BaseModel):
    """
    An attention network (`training.general.attention`).

    :param width: of a token, a multiple of 8 and of the heads
    :param heads: of the attention
    :param wide: width between a layer's two linear maps
    :param layers: number of layers
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    width: Annotated[int, Field(gt=0, multiple_of=8)]
    heads: PositiveInt
    wide: PositiveInt
    layers: PositiveInt

    @model_validator(mode="after")
    def _has_whole_heads(self) -> "Network":
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is no multiple of {self.heads} heads")
        return self


class Training(BaseModel):
    """
    What every recipe says.

    :param steps: decisions over all machines; the last rollout is finished, at the final step size
    :param batch_size: decisions in one minibatch
    :param n_epochs: passes over the rollout in one update
    :param learning_rate: Adam's step size at the start; falls linearly
    :param final_learning_rate: Adam's step size at the end
    :param clip_range: how far one update may move an action's probability
    :param physics: scale of the profile's uncertainty each episode's physics is drawn from
    :param error: fraction by which an episode's parameters are wrong, up or down at random
    :param error_share: in how many of the episodes
    :param unprobed: share of the episodes without a latency probe
    :param stolen: share of the episodes with spells of stolen time
    :param interval_s: range [s] each episode's load interval is drawn from, or none for the
        scenario's
    :param least_load: range of the factor on the load's minimum in each episode, or none
    :param most_load: the same for the load's maximum; at most 1, as observations are scaled by it
    :param evaluate_every: decisions between two evaluations on the selection traces
    :param selection_episodes: number of selection traces
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    steps: PositiveInt
    batch_size: PositiveInt
    n_epochs: PositiveInt
    learning_rate: PositiveFloat
    final_learning_rate: PositiveFloat
    clip_range: PositiveFloat
    physics: Annotated[float, Field(ge=0.0, le=3.0)]
    error: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    error_share: Fraction = 1.0
    unprobed: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    stolen: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    interval_s: tuple[LoadInterval, LoadInterval] | None = None
    least_load: tuple[PositiveFloat, PositiveFloat] | None = None
    most_load: tuple[Fraction, Fraction] | None = None
    evaluate_every: PositiveInt
    selection_episodes: PositiveInt


class Recipe(Training):
    """
    How to train a policy of one scenario.

    :param n_envs: simulated machines in parallel
    :param n_steps: decisions of each machine between two updates
    :param gamma: discount per decision. 1: decisions differ in length, so any smaller discount
        would reward a policy for making many short ones
    :param gae_lambda: bias against variance of the advantage estimate
    :param ent_coef: weight of the entropy bonus
    :param vf_coef: weight of the value loss
    :param hidden: widths of the hidden layers, for the policy and for the value
    :param imitation: how to begin by imitating an expert; none to learn from reward alone
    """

    n_envs: PositiveInt
    n_steps: PositiveInt
    gamma: Fraction
    gae_lambda: Annotated[float, Field(ge=0.0, le=1.0)]
    ent_coef: Annotated[float, Field(ge=0.0)]
    vf_coef: PositiveFloat
    hidden: tuple[PositiveInt, ...]
    imitation: Imitation | None = None


class GeneralRecipe(Training):
    """
    How to train a network for any scenario.

    What is rolled out are lists that are tried from states: `steps` and `evaluate_every` count
    lists, `batch_size` counts states, each with all of its lists.

    :param scenarios: what it is trained on beside those of the family
    :param scenarios_share: share of the episodes that play one of them; the rest plays the family
    :param family: number of scenarios drawn from the family to train on
    :param selection_family: number of those drawn to choose the best checkpoint by
    :param baseline_traces: training traces on which a good list is sought for each scenario that
        the best checkpoint is chosen by
    :param unprofiled: share of the episodes in which some of the jobs have no profile
    :param network: its widths
    :param prices: how a fresh network begins; none for one that learns by PPO alone
    :param episodes: that are played between two updates
    :param lists: that are tried from each state
    """

    scenarios: Annotated[tuple[str, ...], Field(min_length=1)]
    scenarios_share: Annotated[float, Field(ge=0.0, le=1.0)] = 1.0
    family: Annotated[int, Field(ge=0)] = 0
    selection_family: Annotated[int, Field(ge=0)] = 0
    baseline_traces: PositiveInt
    unprofiled: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    network: Network
    prices: Prices | None = None
    episodes: Annotated[int, Field(ge=8)]  # with fewer, a round might try nothing
    lists: Annotated[int, Field(ge=2, le=100)]


def recipe_names() -> list[str]:
    """The shipped recipes."""
    return sorted(path.stem for path in RECIPE_FOLDER.glob("*.yaml"))


def load_recipe(name_or_path: str | Path) -> Recipe:
    """
    Read and validate the recipe of a policy of one scenario.

    :param name_or_path: a shipped recipe's name, or a YAML file
    :raises InputError: one line that names the file, the field and what is allowed
    """
    recipe = any_recipe(name_or_path)
    if not isinstance(recipe, Recipe):
        raise InputError(f"{name_or_path}: for any scenario; allowed is a recipe for one scenario")
    return recipe


def any_recipe(name_or_path: str | Path) -> Recipe | GeneralRecipe:
    """
    Read and validate a recipe; one with `scenarios` is for any scenario.

    :param name_or_path: a shipped recipe's name, or a YAML file
    :raises InputError: one line that names the file, the field and what is allowed
    """
    path = Path(name_or_path)
    if str(name_or_path) in recipe_names():
        path = RECIPE_FOLDER / f"{name_or_path}.yaml"
    content = read_yaml(path, "a recipe", f"known are {', '.join(recipe_names())}")
    general = isinstance(content, dict) and "scenarios" in content
    kind, section = (GeneralRecipe, Prices) if general else (Recipe, Imitation)
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        nested = f"in {section.__name__.lower()} {', '.join(section.model_fields)}"
        allowed = f"; allowed are {', '.join(kind.model_fields)}, and {nested}"
        raise InputError(validation_message(path, error, allowed)) from error
