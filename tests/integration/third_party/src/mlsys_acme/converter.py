from sklearn.base import BaseEstimator, TransformerMixin


class Halver(TransformerMixin, BaseEstimator):
    def fit(self, x, y=None):
        self.n_features_in_ = x.shape[1]
        return self

    def transform(self, x):
        return x / 2
