"""Register mlsys-ray with mlsys; imports nothing heavy."""
