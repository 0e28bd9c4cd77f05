"""
torch's Adam, ready at once.

Every method of a torch optimizer is wrapped so that torch's compiler can handle it, and the first
call imports that compiler: 3 s, at the start of each training run, for something nothing here
uses. `Adam` is the same optimizer with the wrappers taken off.
"""

from inspect import unwrap
from typing import Any

import torch


class Adam(torch.optim.Adam):
    """
    torch's Adam, with the epsilon of Stable-Baselines3 and one operation for all weights.

    :param params: what is optimised
    :param lr: step size
    :param settings: others of `torch.optim.Adam`
    """

    add_param_group = unwrap(torch.optim.Adam.add_param_group)
    load_state_dict = unwrap(torch.optim.Adam.load_state_dict)
    state_dict = unwrap(torch.optim.Adam.state_dict)
    zero_grad = unwrap(torch.optim.Adam.zero_grad)
    step = torch.no_grad()(unwrap(torch.optim.Adam.step))

    def __init__(self, params: Any, lr: float, **settings: Any):
        super().__init__(params, lr, **({"eps": 1e-5, "fused": True} | settings))
