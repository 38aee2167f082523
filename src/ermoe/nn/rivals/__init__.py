"""The paper's rivals and what users would pick today, each one file, all on the same dispatch and experts."""
