"""The items of `scripts/gpu_day.py`: what they are (`plan`), who runs them (`day`, `children`, `child`), and each."""
