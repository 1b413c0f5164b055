"""Owns attention over paged KV.

``paged`` is the one function registered with transformers; ``kv`` is the pool's memory; ``step`` has the words.
On the CPU ``native`` compiles and calls ``native.cpp``, and ``torch_blocks`` does what it cannot;
``triton_step`` launches ``triton_kernels`` on CUDA; ``reference`` says in a few plain lines what the answer is.
"""
