"""Train models larger than memory: state lives on NVMe and streams through a small, fixed amount of RAM."""
