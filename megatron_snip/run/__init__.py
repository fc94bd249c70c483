"""What happens in a job, iteration by iteration; docs/architecture.md has a picture.

state         a run between two iterations, as one value; what a checkpoint keeps
controller    an iteration, from state to state: apply a due plan, observe, run, plan
start         the state that a run starts with, or resumes with
schedule      which iterations measure, and when a new target may be planned for
observation   one refresh, from the measured iteration to the planning problem
plans         which plan a run starts with, or resumes with
fitting       plans and problems of another run, made to fit the settings and linears of this one
feasibility   settings that no plan satisfies, and the default target that one can reach
plan_file     a plan file that contradicts other settings, or ran by other recipes
healing       the target of every iteration, and the order in which GEMMs return to high precision
replanning    when a new plan is asked for: after a refresh, for a new target, after a failure
solve         rank 0's solver: a problem in, a plan out
guard         runs an iteration, again under another plan if the loss demands it
loss_monitor  which loss is a spike, and whether the plan is to blame
step          the forward-backward call itself: its data, loss and gradients
step_times    the mean time of baseline steps under a plan
evaluation    how evaluations are called, in which precision they run, what the plan costs them
alerts        linears beyond the thresholds of `--snip-alert`
"""
