"""Training: the step, the loop, checkpoints, and one run from its folder to its report. See README.md."""
