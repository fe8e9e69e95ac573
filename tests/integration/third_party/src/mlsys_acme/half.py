from mlsys_windtunnel.modules.base import OperatorModule


class Half(OperatorModule):
    def forward(self, x):
        return x / 2


def convert(estimator):
    return Half()
