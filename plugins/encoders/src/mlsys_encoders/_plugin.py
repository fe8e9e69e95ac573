"""Register mlsys-encoders with mlsys; imports nothing heavy."""
