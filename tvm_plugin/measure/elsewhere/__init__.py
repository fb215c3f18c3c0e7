"""What GPUs, RPC and Ray share: programs are built here and run on devices elsewhere, which may be lost."""
