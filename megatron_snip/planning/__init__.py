"""The planner: a problem (quality losses and savings of options) in, a precision plan out.

It needs neither Megatron nor torch. Read in this order:

    problem       the input                           plan         the output
    settings      the constraints and the policy      option_table efficiency, and the arrays
    constraints   the minimization task               lagrangian   its dual
    search        the optimum, with cpsat.py          policies     snip and the baselines
    planner       problem -> plan or frontier         checker      recomputes a plan from scratch

solver_process.py makes plans outside of the training process.
"""
