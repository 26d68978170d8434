"""From a problem to kernels on a device: configurations, plans, running, tuning, and reports from the machine code."""
