"""One process among those of its job: place, start, what all agree on, the watch, the stop signal, a folder's lock."""
