"""What happens in a job, iteration by iteration; docs/life-of-a-plan.md has a picture.

controller    the order of an iteration: apply a due plan, observe, run under the guard, plan
schedule      which iterations measure, and when a new target may be planned for
observation   one measurement, from the first part of the linears to the planning problem
plans         the first plan, plans from elsewhere, healing, what the linears can run
solve         the problem that rank 0's solver works on
guard         runs an iteration, again under another plan if the loss demands it
step          the forward-backward call itself: its data, loss and gradients
alerts        linears beyond the thresholds of `--snip-alert`
metrics       one iteration's loss, gradient norm, learning rate and speed
state         what a checkpoint keeps: {owner: state}
"""
