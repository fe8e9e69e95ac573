from mlsys_acme.notes import note


def scheduler(block_tables, *, max_batch_size, max_model_len):
    from mlsys_orca.scheduling.orca import IterationScheduler

    note(f"scheduler of {max_batch_size} requests")
    return IterationScheduler(block_tables, max_batch_size=max_batch_size, max_model_len=max_model_len)


def batching(*, mode):
    from mlsys_dvabatch.scheduling.policies.base import Policy

    note(f"policy, {mode}")
    return Policy(mode=mode)
