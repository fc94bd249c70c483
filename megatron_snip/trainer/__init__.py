"""The demo: a Llama on Megatron-Core, trained with SNIP on GPUs or on a CPU.

Read it in this order; `cli/train.py` starts the ranks with torch's launcher.

config       the settings, with Megatron's argument names, and whether they fit each other
data         the built-in text, Megatron's GPTDataset, the order of samples
model        GPTModel, DistributedDataParallel, optimizer; the same initial weights in every layout
loop         the training loop
checkpoint   save and resume, in Megatron's distributed format
session      a run: checks, process group, the run's files, what is printed
"""
