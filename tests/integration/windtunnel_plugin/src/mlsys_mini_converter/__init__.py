"""An estimator of a third party and its converter, in one file; torch is imported when something is converted."""

import numpy as np
from mlsys_core.plugins.hookspecs import hookimpl
from mlsys_core.plugins.specs import ConverterSpec
from sklearn.base import BaseEstimator, TransformerMixin


class SoftClipper(TransformerMixin, BaseEstimator):
    """Numbers pressed between the least and the greatest that were seen."""

    def fit(self, x, y=None):
        self.low_, self.high_ = np.min(x, axis=0), np.max(x, axis=0)
        self.n_features_in_ = np.shape(x)[1]
        return self

    def transform(self, x):
        return self.low_ + (self.high_ - self.low_) / (1 + np.exp(-np.asarray(x)))


@hookimpl
def mlsys_register_converters():
    return [
        ConverterSpec(
            name="soft-clipper",
            help="A logistic function between two bounds.",
            source="mlsys_mini_converter:SoftClipper",
            factory="mlsys_mini_converter:convert",
        )
    ]


def convert(estimator):
    import torch
    from mlsys_windtunnel.modules.base import OperatorModule

    class Clip(OperatorModule):
        def __init__(self):
            super().__init__()
            self.low = torch.nn.Parameter(torch.from_numpy(estimator.low_.copy()))
            self.high = torch.nn.Parameter(torch.from_numpy(estimator.high_.copy()))

        def forward(self, x):
            return self.low + (self.high - self.low) * x.sigmoid()

    return Clip()
