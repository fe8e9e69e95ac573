from mlsys_core.report import Section


def bench(context):
    return Section("Acme", [f"counted to three on {context.device}"], data={"count": 3})


def demo(context):
    context.console.print(f"hello from acme's step, on {context.device}")
    return Section("Acme", ["a greeting"])
