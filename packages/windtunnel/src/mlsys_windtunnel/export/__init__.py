"""Writing translated pipelines for other programs: ``.pt2`` and ONNX files, and the plain form that artifacts use."""
