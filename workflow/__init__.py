"""Offload Sweep: from a performance changelog to a comparison of KV-cache offload backends."""
