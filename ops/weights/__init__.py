"""Model files: reading their headers without torch, and turning their tensors into torch's."""
