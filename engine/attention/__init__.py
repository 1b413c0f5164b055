"""Owns attention over paged KV.

``paged`` is the one function registered with transformers; ``kv`` is the pool's memory; ``step`` has the words.
``torch_blocks`` computes on CPU tensors, one request at a time; ``triton_step`` launches ``triton_kernels`` on CUDA;
``reference`` says in a few plain lines what the answer is.
"""
