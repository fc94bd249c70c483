"""From statistics to divergences, equation by equation, and to the planner's problem."""
