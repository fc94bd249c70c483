"""What is observed in a training iteration: taps, errors, sums over ranks, running means."""
