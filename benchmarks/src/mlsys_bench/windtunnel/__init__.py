"""The suites of WindTunnel: exact inference, and the experiments of the dissertation's section 5.4."""
