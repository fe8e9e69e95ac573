from mlsys_core.device import CpuDevice

from mlsys_acme.notes import note


class AcmeDevice(CpuDevice):
    """The processor under another name; it has two, and notes its streams."""

    kind = "acme"

    def __init__(self, index):
        super().__init__()
        self.index = index

    def stream(self, **options):
        note(f"{self.name} made a stream")
        return super().stream(**options)
