"""Names under which fitted times of collectives stand in a cluster file. Text only.

A group of n devices is n neighbours in the order of the device index, or n devices a stride apart. On every mesh the
groups MP, ESP and EP&ESP are neighbours, and EP stands N_ESP apart; so one calibration serves all meshes of a machine.
"""

from __future__ import annotations


def fit_name(collective: str, size: int, *others: int) -> str:
    """Return for example 'all_to_all:8' or 'saa:8,2,4'.

    Args:
      collective: its name; size: devices of the group; others: for SAA, N_MP and N_ESP.
    """
    return f"{collective}:{','.join(map(str, (size, *others)))}"


def strided_name(collective: str, size: int, stride: int) -> str:
    """Return the name for a group of `size` devices that stand `stride` apart."""
    return fit_name(collective, size) if stride == 1 else f"{collective}:{size}x{stride}"
