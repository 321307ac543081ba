"""The models: what a forward pass computes. Knows nothing of users, queues, loops or processes.

Importing this package, or `spec`, does not import torch.
"""
