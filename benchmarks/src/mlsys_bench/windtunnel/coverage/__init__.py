"""Coverage: pipelines and every estimator through each translator, and how exact the results are."""
