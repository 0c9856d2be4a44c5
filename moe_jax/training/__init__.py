"""Training: the step, the loop, the optimizer, and one run from its folder to its report. See README.md."""
