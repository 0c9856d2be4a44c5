"""Mesh, exchanges, gathers and sums over devices, sparse transfers."""
