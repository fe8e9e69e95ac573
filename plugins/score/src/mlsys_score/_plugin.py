"""Register mlsys-score with mlsys; imports nothing heavy."""
