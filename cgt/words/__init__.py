"""What knows nobody: switches, messages, structures of arguments and results, and what PyTorch keeps private."""
