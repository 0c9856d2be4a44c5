"""Recovery: how the processes of a job find and trust each other, and replace one that is lost. No jax in here."""
