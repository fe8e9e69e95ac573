"""Tensor forms of operators: what converters fill with the numbers of fitted estimators."""
