"""Training iterations and evaluations in Megatron-LM's loop."""

from typing import Any

from megatron_snip.patches.registry import Call, Session, patch
from megatron_snip.patches.step import end_step, function_of_evaluation, run_evaluation, run_step

TRAINING = "megatron.training.training"


@patch(TRAINING, "train_step", needs=("forward_backward_func", "iteration"), returns=6)
def train_step(call: Call, session: Session) -> Any:
    """Run the forward-backward function through the controller."""
    if session.controller is None:
        return call.run()
    return run_step(call, session, _iterations_done(call.arguments.get("iteration")) + 1)


@patch(TRAINING, "post_training_step_callbacks", needs=("optimizer", "iteration"))
def report_step(call: Call, session: Session) -> Any:
    """All ranks: report an iteration, after Megatron's log and evaluation."""
    result = call.run()  # a count of FLOPs that the training loop goes on with
    if session.controller is None:
        return result
    from megatron.training.global_vars import get_args

    args = get_args()
    end_step(
        session,
        call.arguments["iteration"],  # Megatron has counted it by now: it is 1-based here
        call.arguments["optimizer"],
        seq_length=int(args.seq_length),
        log_interval=int(args.log_interval),
    )
    return result


@patch(TRAINING, "evaluate", needs=("forward_step_func",), returns=1)
def evaluate(call: Call, session: Session) -> Any:
    """Evaluate in the plan's precision, in BF16, or in both."""
    return run_evaluation(call, session, session.evaluates_test_set)


@patch(TRAINING, "evaluate_and_print_results", needs=("prefix",), optional=True)
def note_test_set(call: Call, session: Session) -> Any:
    """Note whether this call evaluates the test set. Megatron passes that in a log prefix only."""
    session.evaluates_test_set = "on test set" in str(call.arguments["prefix"])
    try:
        return call.run()
    finally:
        session.evaluates_test_set = False


@patch(TRAINING, "get_forward_backward_func")
def forward_backward_func(call: Call, session: Session) -> Any:
    """Return Megatron's forward-backward function, or within an evaluation what runs it there."""
    return function_of_evaluation(call, session)


def _iterations_done(passed: Any) -> int:
    if passed is None:  # scripts that call `train_step` themselves may leave it out
        from megatron.training.global_vars import get_args

        passed = get_args().curr_iteration
    return int(passed)
