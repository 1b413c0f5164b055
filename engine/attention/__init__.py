"""Owns attention over paged KV.

``paged`` is the one function registered with transformers; ``kv`` is the pool's memory; ``torch_blocks`` computes on
CPU tensors, one request at a time; ``reference`` says in a few plain lines what the answer is.
"""
