"""The embedded trainer: a Llama on Megatron-Core, on GPUs or on a CPU.

Read it in this order:

config       the settings, with Megatron's argument names, and whether they fit each other
launch       starts the ranks
session      a run: checks, process group, files, progress
data         the built-in text, Megatron's GPTDataset, the order of samples
model        GPTModel, DistributedDataParallel, optimizer; the same initial weights in every layout
loop         the training loop
checkpoint   save, load, resume
"""
