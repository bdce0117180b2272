"""A policy learns to balance a pole on a cart, by REINFORCE.

    python examples/policy_gradient.py

The simulation is tensor code too: 64 carts move at a time. One of its steps runs some sixty small
ops, so `replay` runs it. The update runs in a block of `lazy_mode`. The program prints

    update 15: 47.5 steps an episode, 197.5 ms an update
    ...
    update 120: 490.7 steps an episode, 64.5 ms an update

With `--eager` both run without lazy-tensor. REINFORCE: R. J. Williams, Simple Statistical
Gradient-Following Algorithms for Connectionist Reinforcement Learning (doi:10.1007/BF00992696).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lazy_tensor

GRAVITY, CART_MASS, POLE_MASS, HALF_LENGTH, FORCE, DT = 9.8, 1.0, 0.1, 0.5, 10.0, 0.02
"""In metres, kilograms and seconds. `HALF_LENGTH` is the pole's, `DT` a step of the simulation."""
MAX_PLACE, MAX_ANGLE = 2.4, 12 * torch.pi / 180
"""An episode ends when the cart leaves its track, or the pole leans by more than 12 degrees."""


def move(state: Tensor, action: Tensor) -> Tensor:
    """The carts `(n_carts, 4)` one `DT` later: place, speed, angle and angular speed of each.

    `action` is 1 where a cart is pushed to the right, 0 where to the left. The equations are from
    A. G. Barto, R. S. Sutton and C. W. Anderson (doi:10.1109/TSMC.1983.6313077), appendix, without
    friction.
    """
    place, speed, angle, spin = state.unbind(1)
    mass, sin, cos = CART_MASS + POLE_MASS, angle.sin(), angle.cos()
    push = (FORCE * (2 * action - 1) + POLE_MASS * HALF_LENGTH * spin * spin * sin) / mass
    spin_rate = (GRAVITY * sin - cos * push) / (
        HALF_LENGTH * (4 / 3 - POLE_MASS * cos * cos / mass)
    )
    speed_rate = push - POLE_MASS * HALF_LENGTH * spin_rate * cos / mass
    rates = torch.stack((speed, speed_rate, spin, spin_rate), dim=1)
    return state + DT * rates


def network(width: int = 64) -> nn.Sequential:
    """A network from states to the logits of a push to the right."""
    return nn.Sequential(
        nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 1), nn.Flatten(start_dim=0)
    )


Step = Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
"""From states and `goes_on` to actions, and to states and `goes_on` a step later."""


def step_of(policy: nn.Module) -> Step:
    """A step of the simulation; `goes_on` is 1 for each episode that has not ended, else 0.

    Episodes that have ended are moved as well: all steps then have the same sizes.
    """

    @torch.no_grad()
    def step(state: Tensor, goes_on: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        chance = policy(state).sigmoid()
        action = torch.bernoulli(chance)
        state = move(state, action)
        stands = (state[:, 0].abs() < MAX_PLACE) & (state[:, 2].abs() < MAX_ANGLE)
        return action, state, goes_on * stands

    return step


def episodes(step: Step, n_carts: int, n_steps: int) -> tuple[Tensor, Tensor, Tensor]:
    """An episode of each cart: states, actions and `goes_on`, with a row for each step."""
    state, goes_on = 0.1 * torch.rand(n_carts, 4) - 0.05, torch.ones(n_carts)
    states, actions, going = [], [], []
    for _ in range(n_steps):
        states.append(state)
        going.append(goes_on)
        action, state, goes_on = step(state, goes_on)
        actions.append(action)
    return torch.stack(states), torch.stack(actions), torch.stack(going)


def update(
    policy: nn.Module, optimizer: torch.optim.Optimizer, states: Tensor, actions: Tensor,
    going: Tensor,
) -> None:  # fmt: skip
    """Make an action likelier if more steps than usual came after it, and less likely if fewer."""
    # the number of steps that came after: the return, without discount
    left = going.flip(0).cumsum(0).flip(0)
    n_going = going.sum(1, keepdim=True).clamp(min=1)
    # the baseline is the mean over all episodes that still went on at the same step
    usual = (left * going).sum(1, keepdim=True) / n_going
    advantage = (left - usual) * going
    advantage = advantage / (advantage.square().sum() / going.sum()).sqrt().clamp(min=1e-6)
    logits = policy(states.flatten(0, 1)).view_as(actions)
    surprise = F.binary_cross_entropy_with_logits(logits, actions, reduction="none")
    loss = (surprise * advantage).sum() / going.sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--updates", type=int, default=120)
    parser.add_argument("--carts", type=int, default=64)
    parser.add_argument("--steps", type=int, default=500, help="of the longest episode")
    parser.add_argument("--eager", action="store_true", help="without lazy-tensor")
    options = parser.parse_args()

    torch.manual_seed(0)
    # one thread leaves a core to the compiler, which builds kernels in the background
    torch.set_num_threads(1)
    policy = network()
    optimizer = torch.optim.Adam(policy.parameters(), lr=5e-3)
    step = step_of(policy) if options.eager else lazy_tensor.replay(step_of(policy))
    mode = nullcontext if options.eager else lazy_tensor.lazy_mode
    every, began = max(1, options.updates // 8), time.perf_counter()
    for i in range(1, options.updates + 1):
        played = episodes(step, options.carts, options.steps)
        with mode():
            update(policy, optimizer, *played)
        if i % every == 0:
            took, began = time.perf_counter() - began, time.perf_counter()
            length = played[2].sum(0).mean().item()
            print(
                f"update {i}: {length:.1f} steps an episode, {took / every * 1e3:.1f} ms an update"
            )


if __name__ == "__main__":
    main()
