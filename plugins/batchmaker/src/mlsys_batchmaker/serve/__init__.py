"""Models and streams as the protocol of models has them (mlsys_serving.models)."""
