"""Register mlsys-windtunnel-catboost with mlsys; imports nothing heavy."""
