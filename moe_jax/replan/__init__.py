"""A run with plans: what it costs, when it plans, and which compiled step runs next."""
