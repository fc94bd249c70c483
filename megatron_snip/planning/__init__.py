"""The planner: a problem (table of quality losses and savings) in, a precision plan out.

It is pure: no Megatron, no torch. Read in this order:

    problem   what is to be decided                 plan        what was decided
    cost      what "efficiency" means               settings    how it is to be decided
    choices   problem + settings, pins resolved     validate    recomputes a plan from scratch
    policies  who decides                           planner     the four steps in one function
"""
