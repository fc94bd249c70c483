"""The embedded trainer: a Llama on Megatron-Core, on GPUs or on a CPU.

Read it in this order:

config               the settings, with Megatron's argument names
megatron_arguments   Megatron's own command lines as settings
launch               starts the ranks with torch's elastic agent
session              a run: checks, process group, files, progress
data                 the built-in text, Megatron's GPTDataset, the order of samples
model                GPTModel, DistributedDataParallel, optimizer, initial weights
loop                 the training loop
checkpoint           save, load, resume
"""
