"""Plans that change while a run trains: the planner's inputs, and what the next step runs with. See README.md."""
