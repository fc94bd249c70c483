"""The parts of a cycle that `controller.py` puts in order.

schedule     when a refresh is due, and whether plans ever change
agreement    how ranks come to one decision when one of them fails
offer        what the linears may be given here; the plan to start with, the plan to be safe with
refresher    passes A and B, with less where memory runs out
solving      the solver's process on rank 0, and its outcome on all ranks
announcer    what people and reporters are told
"""
