"""What reward functions get to know of the run, from its state."""

from collections.abc import Callable

from torchtitan_rl.controller import Controller
from torchtitan_rl.evaluation import Evaluation
from torchtitan_rl.rewards.trainer_state import TrainerState
from torchtitan_rl.services import Prompts
from torchtitan_rl.state import RunState


def trainer_states(
    config: Controller.Config, prompts: Prompts
) -> Callable[[RunState, Evaluation], TrainerState]:
    """Returns `Services.reward_state` of a run."""

    def trainer_state(state: RunState, evaluation: Evaluation) -> TrainerState:
        return TrainerState(
            global_step=state.step,
            max_steps=config.num_steps,
            epoch=prompts.epoch(state.prompts_seen) or 0.0,
            num_input_tokens_seen=state.tokens_seen,
            train_batch_size=config.num_prompts_per_step * config.sampling.n,
            eval_steps=config.evaluation.every,
            best_metric=evaluation.best,
            best_global_step=evaluation.best_step,
        )

    return trainer_state
