"""A model for any scenario that has learned nothing yet."""

from typing import Any

from training.general.branched_ppo import BranchedPPO
from training.general.branching import Explorer
from training.recipe import GeneralRecipe, any_recipe


def fresh(explorer: Explorer, **changes: Any) -> BranchedPPO:
    """
    As the recipe `general` makes it.

    :param explorer: what it would learn from
    :param changes: to the recipe
    """
    recipe = any_recipe("general").model_copy(update=changes)
    assert isinstance(recipe, GeneralRecipe)
    return BranchedPPO(explorer=explorer, recipe=recipe, device="cpu", seed=0)
