"""Register mlsys-open-inference with mlsys; imports nothing heavy."""
