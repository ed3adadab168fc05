"""What is wrong with the samples of a batch, whatever it is made of."""

import math

import torch

from forewarn.snapshots.tensor_facts import batch_faults


def test_a_complex_value_that_is_not_finite_or_out_of_scale_is_named():
    signal = torch.ones(6, 4, dtype=torch.complex64)
    assert list(batch_faults(signal, "input")) == []
    signal[3, 1] = complex(0, 1e6)
    (fault,) = batch_faults(signal, "input")
    assert (fault.kind, fault.samples) == ("out_of_scale", (3,))
    signal[4, 2] = complex(0, math.nan)
    (fault,) = batch_faults(signal, "input")
    assert fault.words == "NaN already in the input, sample 4"
