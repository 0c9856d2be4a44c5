"""How bytes move between devices, as pure functions inside `shard_map`. See README.md."""
