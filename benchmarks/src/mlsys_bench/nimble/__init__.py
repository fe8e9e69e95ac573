"""Nimble against eager, compiled and exported forms of the same nets."""

# Names of the cases.
EAGER, OURS, OURS_SINGLE = "eager", "Nimble", "Nimble, one stream"
PEERS = ("torch.compile", "AOTInductor", "ONNX Runtime", "OpenVINO")
# Of the largest difference from the net's results in float64, over the largest value; more where eager is as far off.
TOLERANCE, EAGER_TIMES = 1e-4, 3.0
