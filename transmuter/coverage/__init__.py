"""The coverage matrix, `python -m transmuter.coverage`: which models run, and whether they match ONNX Runtime."""
