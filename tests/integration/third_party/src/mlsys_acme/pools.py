from mlsys_core.memory import BlockPool, RunPool

from mlsys_acme.notes import note


class AcmeBlocks(BlockPool):
    def allocate(self, n):
        note(f"allocated {n} blocks")
        return super().allocate(n)


class AcmeRuns(RunPool):
    def take(self, count):
        note(f"took a run of {count}")
        return super().take(count)
