"""What a run leaves on disk: its folder, and checkpoints. See README.md."""
