"""Register mlsys-orca-gateway with mlsys; imports nothing heavy."""
