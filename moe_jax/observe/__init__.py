"""The files that a run writes: metrics, loads, progress, TensorBoard, pictures, a report. No jax in here."""
