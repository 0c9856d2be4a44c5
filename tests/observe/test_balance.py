import numpy as np
import pytest

from moe_jax.observe import dead_experts, device_load_max_over_mean, device_loads

# Two layers, two sources, four experts. Sums over sources: layer 0 (4, 2, 0, 2), layer 1 (8, 0, 0, 0).
LOADS = np.array([[[1, 2, 0, 2], [3, 0, 0, 0]], [[8, 0, 0, 0], [0, 0, 0, 0]]], np.int32)
# Layer 0: experts 0, 1 on device 0 and 2, 3 on device 1. Layer 1: in turn.
HOME = np.array([[0, 0, 1, 1], [0, 1, 0, 1]])


def loop_device_loads(loads, home, devices):
    result = np.zeros((loads.shape[0], devices), int)
    for layer in range(loads.shape[0]):
        for source in range(loads.shape[1]):
            for expert in range(loads.shape[2]):
                result[layer, home[layer, expert]] += loads[layer, source, expert]
    return result


def test_device_loads_by_hand_and_by_loops():
    np.testing.assert_array_equal(device_loads(LOADS, HOME, 2), [[6, 2], [8, 0]])
    random = np.random.default_rng(0)
    loads, home = random.integers(0, 50, (3, 4, 12)), random.integers(0, 5, (3, 12))
    np.testing.assert_array_equal(device_loads(loads, home, 5), loop_device_loads(loads, home, 5))


def test_device_load_max_over_mean_by_hand():
    # Layer 0: 6 / 4. Layer 1: everything on one of two devices, the worst case D.
    np.testing.assert_array_equal(device_load_max_over_mean(LOADS, HOME, 2), [1.5, 2.0])
    # Devices without an expert count in the mean: 6 / (8 / 4).
    np.testing.assert_array_equal(device_load_max_over_mean(LOADS, HOME, 4), [3.0, 4.0])


def test_device_load_max_over_mean_without_tokens_is_balanced():
    np.testing.assert_array_equal(device_load_max_over_mean(0 * LOADS, HOME, 2), [1.0, 1.0])


def test_device_loads_do_not_overflow_int32():
    assert device_loads(np.full((1, 2, 1), 2**31 - 1, np.int32), np.zeros((1, 1), int), 1)[0, 0] == 2**32 - 2


def test_dead_experts_by_hand():
    np.testing.assert_array_equal(dead_experts(LOADS), [1, 3])


def test_device_loads_refuses_wrong_homes():
    with pytest.raises(ValueError, match=r"home \[1, 4\] must be \[layers, experts\] = \[2, 4\]"):
        device_loads(LOADS, HOME[:1], 2)
    with pytest.raises(ValueError, match=r"device_ids 0 .. 1; they must be in 0 .. 0"):
        device_loads(LOADS, HOME, 1)
