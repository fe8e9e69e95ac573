"""Register mlsys-gguf-tools with mlsys; imports nothing heavy."""
