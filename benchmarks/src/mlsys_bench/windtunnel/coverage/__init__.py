"""What translates, and how exactly, beside other translators: pipelines, every estimator, and the contestants."""
