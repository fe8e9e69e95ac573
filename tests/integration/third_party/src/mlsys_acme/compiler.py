from mlsys_acme.notes import note


def compile_module(module, example_inputs):
    note(f"compiled {type(module).__name__} for {[tuple(value.shape) for value in example_inputs]}")
    return module
