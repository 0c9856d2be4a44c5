"""Plans that change while a run trains: what the planner is told, and what the next step runs with. See README.md."""
