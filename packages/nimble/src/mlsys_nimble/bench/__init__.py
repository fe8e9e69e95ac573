"""The benchmark of chapter 3 on a CPU: Nimble against eager, compiled and exported forms of the same nets."""
