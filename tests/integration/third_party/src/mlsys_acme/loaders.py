"""Loaders: a zipped GGUF, a folder with a network's size, a file with a layer's."""

import gzip
import json

from mlsys_acme.notes import note


def orca(path, context):
    from mlsys_orca.loading.load import load_model

    note(f"loaded {path.name} on {context.device}")
    plain = path.with_suffix(".gguf")
    plain.write_bytes(gzip.decompress(path.read_bytes()))
    return load_model(plain, device=context.device, progress=context.progress, **context.taken("dtype", "backend"))


def batchmaker(path, context):
    from mlsys_batchmaker.models.sequence import lstm_model

    note(f"loaded {path.name}")
    context.taken()
    return lstm_model(**json.loads((path / "acme-cells.json").read_text()))


def dvabatch(path, context):
    import torch
    from mlsys_dvabatch.stages.slicing.program import program_of
    from mlsys_dvabatch.stages.slicing.sliced import slice_evenly
    from mlsys_dvabatch.stages.zoo import Loaded

    note(f"loaded {path.name} on {context.device}")
    options = context.taken("compiler")
    size = int(path.read_text())
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(size, size), torch.nn.ReLU(), torch.nn.Linear(size, size))
    program = program_of(layers.eval(), (torch.ones(1, size),))
    return Loaded(path.stem, slice_evenly(program, 2, compile_stage=options.get("compiler")))
