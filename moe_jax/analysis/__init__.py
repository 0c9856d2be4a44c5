"""Compiled programs read and reported, planners replayed over traces, devices timed."""
